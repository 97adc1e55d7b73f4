#pragma once

#include <cstdint>
#include <exception>

/// Thrown to end the program after SIGINT or SIGTERM, with exit code 128 + `signal`. A checkpoint of `step`
/// has been saved.
struct Interrupted : std::exception {
  Interrupted(int signal, int64_t step) : signal(signal), step(step) {}
  int signal;
  int64_t step;
};

/// Defers SIGINT and SIGTERM during its own lifetime. The first signal is only recorded, so that the program
/// can finish the step and save a checkpoint. The second signal ends the process at once. Signals that the
/// process ignores stay ignored.
class DeferredSignals {
 public:
  DeferredSignals();
  ~DeferredSignals();
  DeferredSignals(const DeferredSignals&) = delete;
  DeferredSignals& operator=(const DeferredSignals&) = delete;

  /// Returns the signal that was received, or 0.
  int received() const;
};

/// Prints that signals wait for the end of a step, if a step takes more than 20 s.
void tell_wait(double step_seconds);
