// Tests shoestring/runs/monitor.h with real work, and with a stand-in for NVML.
// tests/python/runs/test_monitor_rules.py tests the rules on made-up samples.

#include "catch.h"

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <set>
#include <thread>

#include <shoestring/runs/monitor.h>

using Catch::Contains;
using shoestring::Monitor;
using shoestring::MonitorReport;
using shoestring::MonitorSample;

namespace {

void nap(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Uses this much time of the processor, however many other processes run.
void compute(double seconds) {
  const auto used = [] {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
  };
  for (const double end = used() + seconds; used() < end;) {
  }
}

// A range of numbers, each of which takes a while.
struct SlowNumbers {
  struct iterator {
    int value;
    double seconds;
    int operator*() const { return value; }
    iterator& operator++() {
      nap(seconds);
      ++value;
      return *this;
    }
    bool operator!=(const iterator& other) const { return value != other.value; }
  };
  int count;
  double seconds;
  iterator begin() {
    nap(seconds);
    return {0, seconds};
  }
  iterator end() { return {count, seconds}; }
};

std::set<std::string> resources(const MonitorReport& report) {
  std::set<std::string> found;
  for (const auto& each : report.findings) found.insert(each.resource);
  return found;
}

}  // namespace

TEST_CASE("a monitor names a loop that waits for its data", "[monitor]") {
  Monitor monitor(shoestring::MonitorOptions(0.1).workers(0));
  SlowNumbers numbers{10, 0.05};
  int sum = 0;
  for (const int number : monitor.watch(numbers)) {
    sum += number;
    nap(0.01);
  }
  nap(0.2);  // is not a step
  const MonitorReport report = monitor.stop();
  CHECK(sum == 45);
  CHECK(report.total.steps == 10);
  CHECK(report.total.wait_seconds >= 0.5);
  CHECK(report.total.step_seconds >= 0.1);
  CHECK(report.total.wait_seconds + report.total.step_seconds <= report.total.seconds - 0.15);
  CHECK(resources(report).count("data") == 1);
  CHECK_THAT(report.table(), Contains("of the loop waits for the next batch"));
  CHECK_THAT(report.table(), Contains("0 worker processes"));
  CHECK_THAT(report.json(), Contains("\"resource\":\"data\""));
}

TEST_CASE("a monitor has no data finding for a loop that computes", "[monitor]") {
  Monitor monitor(shoestring::MonitorOptions(0.1));
  for (int i = 0; i < 10; ++i) {
    {
      const auto wait = monitor.wait();
    }
    const auto step = monitor.step();
    compute(0.05);
  }
  const MonitorReport report = monitor.stop();
  CHECK(report.total.steps == 10);
  CHECK(report.total.step_seconds >= 0.5);
  CHECK(report.total.cpu_seconds >= 0.4);
  CHECK(report.total.thread_seconds >= 0.4);
  CHECK(resources(report).count("data") == 0);
  CHECK(resources(report).count("disk") == 0);
  // After the end, nothing is measured.
  {
    const auto step = monitor.step();
  }
  CHECK(monitor.report().total.steps == 10);
}

TEST_CASE("a loop that is left early has no open step", "[monitor]") {
  Monitor monitor(shoestring::MonitorOptions(0.1));
  SlowNumbers numbers{10, 0.0};
  for (const int number : monitor.watch(numbers)) {
    if (number == 3) break;
  }
  nap(0.1);
  for (const int number : monitor.watch(numbers)) (void)number;
  const MonitorReport report = monitor.report();
  CHECK(report.total.steps == 13);
  CHECK(report.total.step_seconds < 0.1);
}

TEST_CASE("a monitor sees a peak of memory between two samples, and children", "[monitor]") {
  Monitor monitor(shoestring::MonitorOptions(10));
  const double before = monitor.report().total.memory_peak;
  {
    std::vector<char> block(600u << 20);
    std::memset(block.data(), 1, block.size());
  }
  MonitorReport report = monitor.report();
  CHECK(report.total.memory_peak >= before + 500e6);
  const pid_t child = ::fork();
  if (child == 0) {
    compute(0.3);
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  report = monitor.stop();
  CHECK(report.total.cpu_seconds >= 0.25);
}

TEST_CASE("a forked child measures nothing and ends", "[monitor]") {
  auto monitor = std::make_unique<Monitor>(shoestring::MonitorOptions(0.1));
  const pid_t child = ::fork();
  if (child == 0) {
    {
      const auto step = monitor->step();
    }
    const bool good = monitor->report().samples.empty() && monitor->stop().total.steps == 0;
    monitor.reset();
    ::_exit(good ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  CHECK(status == 0);
}

TEST_CASE("a monitor reads GPUs from NVML", "[monitor]") {
  // A library that is loaded under this name is used by later calls of dlopen.
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  void* stand_in = ::dlopen((folder / "nvml/libnvidia-ml.so.1").c_str(), RTLD_NOW | RTLD_GLOBAL);
  REQUIRE(stand_in != nullptr);
  Monitor monitor(shoestring::MonitorOptions(0.1));
  nap(0.5);
  const MonitorReport report = monitor.stop();
  ::dlclose(stand_in);
  REQUIRE(report.total.gpus.size() == 1);
  const auto& gpu = report.total.gpus[0];
  CHECK(gpu.busy_seconds == Approx(0.25 * report.total.seconds));
  CHECK(gpu.energy == Approx(250 * report.total.seconds));
  CHECK(gpu.hot_seconds == Approx(report.total.seconds));
  CHECK(gpu.memory_peak == double(4ull << 30));
  CHECK(gpu.is_used == 1);
  CHECK(report.machine.gpu_names == std::vector<std::string>{"Stand-in"});
  CHECK(resources(report).count("gpu") == 1);
  CHECK_THAT(report.table(), Contains("GPU 0 is idle 75 % of the time"));
  CHECK_THAT(report.table(), Contains("for heat 100 % of the time"));
}

TEST_CASE("a monitor refuses options out of range", "[monitor]") {
  CHECK_THROWS_WITH(Monitor(shoestring::MonitorOptions(0.05)),
                    Contains("Monitor: interval: expected 0.1 to 10 seconds, received 0.05"));
  CHECK_THROWS_WITH(Monitor(shoestring::MonitorOptions(std::nan(""))), Contains("received nan"));
  CHECK_THROWS_WITH(Monitor(shoestring::MonitorOptions().workers(-2)),
                    Contains("Monitor: workers: expected -1 or more, received -2"));
}
