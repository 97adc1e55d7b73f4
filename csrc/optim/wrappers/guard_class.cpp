// Registers the class Guard, with which Python's Guard judges steps. Python steps the optimizer, which may be
// of any class, and copies its state.

#include <torch/custom_class.h>
#include <torch/library.h>

#include "optim/core/state_entries.h"
#include "optim/wrappers/guard_core.h"

namespace shoestring::optim {
namespace {

using at::Tensor;

class GuardHolder : public torch::CustomClassHolder {
 public:
  GuardHolder(const std::string& on, std::optional<double> spike, int64_t window, int64_t every,
              std::optional<int64_t> limit, const std::string& group)
      : core_(GuardOptions(on).spike(spike).window(window).every(every).limit(limit).group(group)) {}

  void watch(const Tensor& loss) { core_.watch(loss); }
  bool review() { return core_.review(); }
  Tensor judge(const std::vector<Tensor>& gradients) { return core_.judge(gradients); }
  void record(const Tensor& skipped) { core_.record(skipped); }
  void drop() { core_.drop(); }
  bool is_copy_due() { return core_.is_copy_due(); }
  void copied() { core_.copied(); }
  int64_t steps() { return core_.steps(); }
  int64_t rollbacks() { return core_.rollbacks(); }
  std::vector<std::tuple<int64_t, std::string, double>> bad_steps() {
    std::vector<std::tuple<int64_t, std::string, double>> result;
    for (const BadStep& bad : core_.bad_steps()) result.emplace_back(bad.step, bad.reason, bad.loss);
    return result;
  }
  detail::StateEntries state() { return detail::entries_of(core_.state()); }
  void load_state(const detail::StateEntries& entries) { core_.load_state(detail::state_of(entries)); }

 private:
  detail::GuardCore core_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<GuardHolder>("Guard")
      .def(torch::init<std::string, std::optional<double>, int64_t, int64_t, std::optional<int64_t>,
                       std::string>())
      .def("watch", &GuardHolder::watch)
      .def("review", &GuardHolder::review)
      .def("judge", &GuardHolder::judge)
      .def("record", &GuardHolder::record)
      .def("drop", &GuardHolder::drop)
      .def("is_copy_due", &GuardHolder::is_copy_due)
      .def("copied", &GuardHolder::copied)
      .def("steps", &GuardHolder::steps)
      .def("rollbacks", &GuardHolder::rollbacks)
      .def("bad_steps", &GuardHolder::bad_steps)
      .def("state", &GuardHolder::state)
      .def("load_state", &GuardHolder::load_state);
}

}  // namespace shoestring::optim
