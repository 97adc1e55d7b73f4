#pragma once

#include <cstdint>
#include <exception>

/// Ends a program after SIGINT or SIGTERM with the exit code 128 + `signal`; `step` has a checkpoint.
struct Interrupted : std::exception {
  Interrupted(int signal, int64_t step) : signal(signal), step(step) {}
  int signal;
  int64_t step;
};

/// While it lives, the first SIGINT or SIGTERM is only noted, so that the step can be finished and a
/// checkpoint saved; the second one ends the process at once. A signal that the process ignores stays
/// ignored.
class DeferredSignals {
 public:
  DeferredSignals();
  ~DeferredSignals();
  DeferredSignals(const DeferredSignals&) = delete;
  DeferredSignals& operator=(const DeferredSignals&) = delete;

  /// The signal that has come, or 0.
  int received() const;
};

/// Says once how long a signal waits, where a step takes more than 20 s.
void tell_wait(double step_seconds);
