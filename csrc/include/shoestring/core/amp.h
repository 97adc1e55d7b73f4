#pragma once

// Mixed precision for C++ programs. shoestring/optim/grad_scaler.h scales the loss for training in fp16.

#include <vector>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <shoestring/core/export.h>

namespace shoestring {

namespace detail {  // internal namespace, not part of the API

/// This thread's autocast settings for one device type. All device types share cache_enabled.
struct AutocastState {
  c10::DeviceType device;
  c10::ScalarType dtype;
  bool enabled, cache_enabled;
};

/// Returns this thread's autocast settings for every device type that has autocast.
std::vector<AutocastState> autocast_states();

}  // namespace detail

/// Turns autocast on (or off) for one device type while the guard lives, like torch.autocast in Python:
///
///     {
///       const shoestring::AutocastGuard autocast(at::kCPU, at::kBFloat16);
///       loss = loss_of(model->forward(input), target);
///     }
///     loss.backward();  // outside: backward uses the dtypes that forward has chosen
///
/// Guards nest. The destructor restores the settings that the constructor has found: whether autocast is
/// enabled for `device`, its dtype, and whether cast weights are cached. The end of the outermost guard
/// clears the cache of cast weights. All settings belong to the thread. Guards must end in the reverse order
/// of their construction, on the same thread.
///
/// device: the type of the devices whose operators are cast.
/// dtype: at::kBFloat16 or at::kHalf. Ignored while autocast is disabled.
/// enabled: false turns autocast off inside an outer guard.
/// cache_enabled: cast each weight once per outermost guard and use the result again. A cast weight has the
/// values of the first use, so pass false if weights change inside the guard.
///
/// Raises c10::Error if `device` has no autocast, or if autocast does not support `dtype`.
class SHOESTRING_API AutocastGuard {
 public:
  AutocastGuard(c10::DeviceType device, c10::ScalarType dtype, bool enabled = true,
                bool cache_enabled = true);
  /// Internal: applies the settings of several device types.
  explicit AutocastGuard(const std::vector<detail::AutocastState>& states);
  ~AutocastGuard();
  AutocastGuard(const AutocastGuard&) = delete;
  AutocastGuard& operator=(const AutocastGuard&) = delete;

 private:
  std::vector<detail::AutocastState> before_;
};

}  // namespace shoestring
