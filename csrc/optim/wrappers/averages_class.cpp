// Registers the class Averages, with which Python's Averages works. Python passes the tensors of the model to
// each call, because modules may have replaced them.

#include <torch/custom_class.h>
#include <torch/library.h>

#include "optim/core/state_entries.h"
#include "optim/wrappers/averages_core.h"

namespace shoestring::optim {
namespace {

using at::Tensor;
using Flags = c10::List<bool>;

class AveragesHolder : public torch::CustomClassHolder {
 public:
  AveragesHolder(std::vector<std::string> names, const std::vector<Tensor>& tensors, const Flags& trained,
                 int64_t parameters, const std::string& kind, double decay, int64_t every, int64_t last,
                 const std::string& format, const std::string& offload, int64_t seed)
      : core_(std::move(names), tensors, trained.vec(), static_cast<size_t>(parameters),
              AveragesOptions(kind).decay(decay).every(every).last(last).format(format).offload(offload).seed(
                  seed)) {}

  bool is_due() const {
    const auto alone = core_.lock();
    return core_.is_due();
  }
  /// Counts a step that does not update the averages.
  void count() {
    const auto alone = core_.lock();
    core_.update();
  }
  void update(const std::vector<Tensor>& tensors, const Flags& trained) {
    const auto alone = core_.lock();
    core_.use(tensors, trained.vec());
    core_.update();
  }
  void swap_in(const std::vector<Tensor>& tensors, const Flags& trained) {
    const auto alone = core_.lock();
    core_.use(tensors, trained.vec());
    core_.swap_in();
  }
  void swap_out() {
    const auto alone = core_.lock();
    core_.swap_out();
  }
  void copy_to(const std::vector<std::string>& names, const std::vector<Tensor>& tensors) const {
    const auto alone = core_.lock();
    core_.copy_to(names, tensors);
  }
  int64_t updates() const {
    const auto alone = core_.lock();
    return core_.updates();
  }
  detail::StateEntries state() const {
    const auto alone = core_.lock();
    return detail::entries_of(core_.state());
  }
  void load_state(const detail::StateEntries& entries) {
    const auto alone = core_.lock();
    core_.load_state(detail::state_of(entries));
  }

 private:
  detail::AveragesCore core_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<AveragesHolder>("Averages")
      .def(torch::init<std::vector<std::string>, std::vector<Tensor>, Flags, int64_t, std::string, double,
                       int64_t, int64_t, std::string, std::string, int64_t>())
      .def("is_due", &AveragesHolder::is_due)
      .def("count", &AveragesHolder::count)
      .def("update", &AveragesHolder::update)
      .def("swap_in", &AveragesHolder::swap_in)
      .def("swap_out", &AveragesHolder::swap_out)
      .def("copy_to", &AveragesHolder::copy_to)
      .def("updates", &AveragesHolder::updates)
      .def("state", &AveragesHolder::state)
      .def("load_state", &AveragesHolder::load_state);
}

}  // namespace shoestring::optim
