#include "training.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <numbers>
#include <string>

double learning_rate(int64_t step, int64_t steps, int64_t warmup, double highest) {
  if (step < warmup) return highest * static_cast<double>(step + 1) / static_cast<double>(warmup);
  const double progress =
      static_cast<double>(step - warmup) / static_cast<double>(std::max<int64_t>(1, steps - warmup));
  return highest * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

int64_t peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6)) * 1024;
  }
  return 0;
}

Progress::Progress(int64_t steps, int64_t tokens_per_step)
    : steps_(steps), tokens_(tokens_per_step), terminal_(::isatty(STDOUT_FILENO)) {}

void Progress::show(int64_t step, double loss, double seconds) {
  // The first training step also allocates memory, so it is not timed.
  if (shown_++ > 0) timed_ += seconds;
  const bool last = step == steps_;
  if (!terminal_ && !last && step % std::max<int64_t>(1, steps_ / 20) != 0) return;
  std::printf("%sstep %lld/%lld  loss %.4f  %.0f tokens/s  peak %lld MiB%s", terminal_ ? "\r\033[K" : "",
              static_cast<long long>(step), static_cast<long long>(steps_), loss,
              static_cast<double>(tokens_) / seconds, static_cast<long long>(peak_memory() >> 20),
              terminal_ && !last ? "" : "\n");
  std::fflush(stdout);
}

double Progress::tokens_per_second() const {
  return timed_ > 0 ? static_cast<double>(tokens_ * (shown_ - 1)) / timed_ : 0;
}
