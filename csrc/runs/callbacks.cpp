#include <algorithm>

#include <shoestring/runs/callbacks.h>

namespace shoestring::callbacks {

Callback::~Callback() = default;
void Callback::on_start(Run&) {}
void Callback::on_step(Run&) {}
void Callback::on_metrics(Run&) {}
void Callback::on_end(Run&) {}
TensorDict Callback::state() const { return TensorDict(); }
void Callback::load_state(const TensorDict&) {}

OnStep::OnStep(std::function<void()> call, int64_t every) : call_(std::move(call)), every_(every) {
  TORCH_CHECK_VALUE(every >= 1, "OnStep: every: expected a number of at least 1, received ", every);
}

void OnStep::on_step(Run& run) {
  if (run.step % every_ == 0) call_();
}

TensorDict OnStep::state() const { return part_ ? part_->state() : TensorDict(); }

void OnStep::load_state(const TensorDict& state) {
  if (part_) part_->load_state(state);
}

void Callbacks::add_callback(const std::string& name, std::shared_ptr<Callback> callback) {
  const bool is_new = std::none_of(callbacks_.begin(), callbacks_.end(),
                                   [&](const auto& other) { return other.first == name; });
  TORCH_CHECK_VALUE(is_new && !name.empty() && name.find('.') == std::string::npos,
                    "Callbacks: name: expected a new name without a dot, received \"", name, "\"");
  TORCH_CHECK_VALUE(callback != nullptr, "Callbacks: ", name, ": expected a callback, received null");
  callbacks_.emplace_back(name, std::move(callback));
}

void Callbacks::on_start(Run& run) {
  for (const auto& [name, callback] : callbacks_) callback->on_start(run);
}
void Callbacks::on_step(Run& run) {
  for (const auto& [name, callback] : callbacks_) callback->on_step(run);
}
void Callbacks::on_metrics(Run& run) {
  for (const auto& [name, callback] : callbacks_) callback->on_metrics(run);
}
void Callbacks::on_end(Run& run) {
  for (const auto& [name, callback] : callbacks_) callback->on_end(run);
}

TensorDict Callbacks::state() const {
  TensorDict all;
  for (const auto& [name, callback] : callbacks_) {
    for (const auto& entry : callback->state()) all.insert(name + "." + entry.key(), entry.value());
  }
  return all;
}

void Callbacks::load_state(const TensorDict& state) {
  std::map<std::string, TensorDict> states;
  for (const auto& [name, callback] : callbacks_) states[name];
  for (const auto& entry : state) {
    const std::string name = entry.key().substr(0, entry.key().find('.'));
    const auto found = states.find(name);
    TORCH_CHECK_VALUE(found != states.end(), "Callbacks: load_state: expected the state of one of ",
                      states.size(), " callbacks, received one of ", name);
    found->second.insert(entry.key().substr(std::min(name.size() + 1, entry.key().size())), entry.value());
  }
  for (const auto& [name, callback] : callbacks_) callback->load_state(states[name]);
}

}  // namespace shoestring::callbacks
