#include <string>

#include <ATen/autocast_mode.h>

#include <shoestring/core/amp.h>

namespace shoestring {
namespace detail {
namespace {

AutocastState autocast_state(c10::DeviceType device) {
  return {device, at::autocast::get_autocast_dtype(device), at::autocast::is_autocast_enabled(device),
          at::autocast::is_autocast_cache_enabled()};
}

void set_autocast(const AutocastState& state) {
  at::autocast::set_autocast_enabled(state.device, state.enabled);
  at::autocast::set_autocast_dtype(state.device, state.dtype);
  at::autocast::set_autocast_cache_enabled(state.cache_enabled);
}

AutocastState checked_autocast(const AutocastState& state) {
  std::string devices;
  for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    devices += (devices.empty() ? "" : ", ") + c10::DeviceTypeName(device, /*lower_case=*/true);
  const std::string name = c10::DeviceTypeName(state.device, /*lower_case=*/true);
  TORCH_CHECK(at::autocast::is_autocast_available(state.device),
              "AutocastGuard: device: expected a device type with autocast (", devices, "), received ", name,
              ". Pass the type of the device that holds the model.");
  TORCH_CHECK(!state.enabled || state.dtype == at::kBFloat16 || state.dtype == at::kHalf,
              "AutocastGuard: dtype: expected BFloat16 or Half, which autocast on ", name,
              " supports, received ", state.dtype, ". Pass enabled=false to turn autocast off.");
  return state;
}

}  // namespace

std::vector<AutocastState> autocast_states() {
  std::vector<AutocastState> states;
  for (const auto device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    states.push_back(autocast_state(device));
  return states;
}

}  // namespace detail

AutocastGuard::AutocastGuard(c10::DeviceType device, c10::ScalarType dtype, bool enabled, bool cache_enabled)
    : AutocastGuard(std::vector<detail::AutocastState>{
          detail::checked_autocast({device, dtype, enabled, cache_enabled})}) {}

AutocastGuard::AutocastGuard(const std::vector<detail::AutocastState>& states) {
  for (const auto& state : states) before_.push_back(detail::autocast_state(state.device));
  for (const auto& state : states) detail::set_autocast(state);
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  for (const auto& state : before_) detail::set_autocast(state);
}

}  // namespace shoestring
