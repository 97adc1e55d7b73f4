#include "signals.h"

#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <string_view>

namespace {

constexpr int kHandled[] = {SIGINT, SIGTERM};
// Seconds per training step above which tell_wait() prints a message. Batch systems kill a process about 30 s
// after SIGTERM.
constexpr double kLongWait = 20;

volatile sig_atomic_t first = 0;
struct sigaction before[std::size(kHandled)];

void note(int signal) {
  const bool second = first != 0;
  const std::string_view text =
      second ? "second signal: exit at once\n"
             : "the step is finished and a checkpoint saved; a second signal exits at once\n";
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
  if (second) ::_exit(128 + signal);
  first = signal;
}

}  // namespace

DeferredSignals::DeferredSignals() {
  first = 0;
  struct sigaction action{};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < std::size(kHandled); ++i) {
    ::sigaction(kHandled[i], nullptr, &before[i]);
    if (before[i].sa_handler != SIG_IGN) ::sigaction(kHandled[i], &action, nullptr);
  }
}

DeferredSignals::~DeferredSignals() {
  for (size_t i = 0; i < std::size(kHandled); ++i) ::sigaction(kHandled[i], &before[i], nullptr);
}

int DeferredSignals::received() const { return first; }

void tell_wait(double step_seconds) {
  if (step_seconds <= kLongWait) return;
  std::printf("a step takes %.0f s: Ctrl-C and SIGTERM wait for its end, a second one exits at once\n",
              step_seconds);
  std::fflush(stdout);
}
