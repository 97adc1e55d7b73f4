#pragma once

#include <ATen/autocast_mode.h>

#include <array>

namespace shoestring::activations {

/// A copy of this thread's autocast settings for the CPU and for CUDA, taken by the constructor.
class AutocastState {
 public:
  AutocastState() {
    for (size_t i = 0; i < kDevices.size(); ++i) {
      enabled_[i] = at::autocast::is_autocast_enabled(kDevices[i]);
      dtype_[i] = at::autocast::get_autocast_dtype(kDevices[i]);
    }
  }

  /// Applies the stored settings to this thread. To return to the settings before, construct another
  /// AutocastState first and restore it afterwards.
  void restore() const {
    for (size_t i = 0; i < kDevices.size(); ++i) {
      at::autocast::set_autocast_enabled(kDevices[i], enabled_[i]);
      at::autocast::set_autocast_dtype(kDevices[i], dtype_[i]);
    }
    at::autocast::set_autocast_cache_enabled(cache_);
  }

 private:
  static constexpr std::array kDevices{at::kCPU, at::kCUDA};
  std::array<bool, 2> enabled_{};
  std::array<at::ScalarType, 2> dtype_{};
  bool cache_ = at::autocast::is_autocast_cache_enabled();
};

/// Applies an autocast state while the guard lives. The destructor restores the former settings, and clears
/// the cache of cast weights at the end of the outermost autocast region.
class AutocastGuard {
 public:
  explicit AutocastGuard(const AutocastState& state) {
    state.restore();
    at::autocast::increment_nesting();
  }
  ~AutocastGuard() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    before_.restore();
  }
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  AutocastState before_;
};

}  // namespace shoestring::activations
