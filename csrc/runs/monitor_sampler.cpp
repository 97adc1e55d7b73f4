#include "runs/monitor_sampler.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "runs/monitor_fields.h"

namespace shoestring::runs {
namespace {

constexpr size_t kMostSamples = 4096, kRecentSamples = 128;

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string interval_error(double interval) {
  if (interval >= 0.1 && interval <= 10) return "";
  char text[128];
  std::snprintf(text, sizeof text, "interval: expected 0.1 to 10 seconds, received %g", interval);
  return text;
}

MonitorSampler::MonitorSampler(pid_t root, double interval, bool measures_starvation)
    : owner_(::getpid()), interval_(interval), measures_starvation_(measures_starvation),
      start_(steady_seconds()), proc_(root) {
  machine_ = proc_.machine();
  nvml_.describe(machine_);
  last_ = steady_seconds();
  // Signals are for the threads of the program.
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

MonitorSampler::~MonitorSampler() { stop(); }

bool MonitorSampler::is_elsewhere() const { return ::getpid() != owner_; }

void MonitorSampler::run() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, std::chrono::duration<double>(interval_), [this] { return is_stopped_; })) {
    lock.unlock();
    sample();
    lock.lock();
  }
}

void MonitorSampler::sample() {
  const std::lock_guard reading(reading_);
  MonitorSample sample = proc_.read();
  const double now = steady_seconds();
  sample.time = now - start_;
  sample.seconds = now - last_;
  sample.gpus = nvml_.read(sample.seconds, proc_.tree());
  last_ = now;
  const std::string disk = proc_.machine().disk;
  const std::lock_guard lock(mutex_);
  machine_.disk = disk;
  sample.wait_seconds = loop_.wait_seconds;
  sample.starved_seconds = measures_starvation_ ? loop_.starved_seconds : loop_.wait_seconds;
  sample.step_seconds = loop_.step_seconds;
  sample.steps = loop_.steps;
  sample.device_memory_peak = loop_.device_memory_peak;
  loop_ = MonitorSample();
  push(sample);
}

void MonitorSampler::push(const MonitorSample& sample) {
  recent_.push_back(sample);
  if (recent_.size() > kRecentSamples) recent_.erase(recent_.begin(), recent_.begin() + kRecentSamples / 2);
  if (merged_ < merge_ && !samples_.empty())
    append(samples_.back(), sample);
  else
    samples_.push_back(sample), merged_ = 0;
  ++merged_;
  if (samples_.size() < kMostSamples || merged_ < merge_) return;
  for (size_t i = 0; i < samples_.size() / 2; ++i) {
    MonitorSample pair = samples_[2 * i];
    append(pair, samples_[2 * i + 1]);
    samples_[i] = std::move(pair);
  }
  samples_.resize(samples_.size() / 2);
  merge_ *= 2;
  merged_ = merge_;
}

void MonitorSampler::begin_wait() {
  if (is_elsewhere()) return;
  const double now = steady_seconds();
  const std::lock_guard lock(mutex_);
  if (step_began_ >= 0 && !has_explicit_steps_) {
    loop_.step_seconds += now - step_began_;
    loop_.steps += 1;
    step_began_ = -1;
  }
  wait_began_ = now;
}

void MonitorSampler::end_wait() {
  if (is_elsewhere()) return;
  const double now = steady_seconds();
  const std::lock_guard lock(mutex_);
  if (wait_began_ < 0) return;
  loop_.wait_seconds += now - wait_began_;
  wait_began_ = -1;
  if (!has_explicit_steps_) step_began_ = now;
}

void MonitorSampler::begin_step() {
  if (is_elsewhere()) return;
  const double now = steady_seconds();
  const std::lock_guard lock(mutex_);
  has_explicit_steps_ = true;
  step_began_ = now;
}

void MonitorSampler::end_step() {
  if (is_elsewhere()) return;
  const double now = steady_seconds();
  const std::lock_guard lock(mutex_);
  if (step_began_ < 0) return;
  loop_.step_seconds += now - step_began_;
  loop_.steps += 1;
  step_began_ = -1;
}

void MonitorSampler::end_loop() {
  if (is_elsewhere()) return;
  const std::lock_guard lock(mutex_);
  wait_began_ = -1;
  if (!has_explicit_steps_) step_began_ = -1;
}

void MonitorSampler::starved(double seconds) {
  if (is_elsewhere()) return;
  const std::lock_guard lock(mutex_);
  loop_.starved_seconds += seconds;
}

void MonitorSampler::device_memory(double bytes) {
  if (is_elsewhere()) return;
  const std::lock_guard lock(mutex_);
  loop_.device_memory_peak = std::max(loop_.device_memory_peak, bytes);
}

void MonitorSampler::set_workers(int64_t workers) {
  if (is_elsewhere()) return;
  const std::lock_guard lock(mutex_);
  machine_.workers = workers;
}

MonitorReport MonitorSampler::report() {
  if (is_elsewhere()) return {};
  bool is_running;
  {
    const std::lock_guard lock(mutex_);
    is_running = !is_stopped_;
  }
  if (is_running) sample();
  const std::lock_guard lock(mutex_);
  return monitor_report(machine_, samples_);
}

MonitorSample MonitorSampler::recent(double seconds) {
  MonitorSample all;
  if (is_elsewhere()) return all;
  const std::lock_guard lock(mutex_);
  auto first = recent_.end();
  for (double covered = 0; first != recent_.begin() && covered < seconds;) covered += (--first)->seconds;
  for (; first != recent_.end(); ++first) append(all, *first);
  return all;
}

MonitorMachine MonitorSampler::machine() {
  if (is_elsewhere()) return {};
  const std::lock_guard lock(mutex_);
  return machine_;
}

void MonitorSampler::stop() {
  if (is_elsewhere() || !thread_.joinable()) return;
  sample();
  {
    const std::lock_guard lock(mutex_);
    is_stopped_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

}  // namespace shoestring::runs
