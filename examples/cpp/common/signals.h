#pragma once

#include <cstdint>
#include <exception>

/// Thrown to end the program after SIGINT or SIGTERM, with exit code 128 + `signal`. A checkpoint after
/// `step` steps has been saved.
struct Interrupted : std::exception {
  Interrupted(int signal, int64_t step) : signal(signal), step(step) {}
  int signal;
  int64_t step;
};

/// Defers SIGINT and SIGTERM while this object exists. The first signal is only recorded, so that the program
/// can finish the training step and save a checkpoint. The second signal ends the process at once. Signals
/// that the process ignores stay ignored.
class DeferredSignals {
 public:
  DeferredSignals();
  ~DeferredSignals();
  DeferredSignals(const DeferredSignals&) = delete;
  DeferredSignals& operator=(const DeferredSignals&) = delete;

  /// Returns the number of the signal that was received, or 0 if none was.
  int received() const;
};

/// Tells the user that signals wait for the end of a training step, if a step takes more than 20 s.
void tell_wait(double step_seconds);
