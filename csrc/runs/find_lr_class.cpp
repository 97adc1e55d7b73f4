// Registers the class LrPass, with which Python judges the losses of learning rates.

#include <shoestring/runs/find_lr.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace shoestring {
namespace {

struct LrPassHolder : torch::CustomClassHolder {
  LrPassHolder(const std::vector<double>& lrs, const std::vector<double>& losses)
      : pass(judge_lrs(lrs, losses)) {}

  double steepest() { return pass.steepest; }
  double tenth() { return pass.tenth; }
  static bool diverges(const std::vector<double>& losses) { return lr_losses_diverge(losses); }

  LrPass pass;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<LrPassHolder>("LrPass")
      .def(torch::init<std::vector<double>, std::vector<double>>())
      .def("steepest", &LrPassHolder::steepest)
      .def("tenth", &LrPassHolder::tenth)
      .def_static("diverges", &LrPassHolder::diverges);
}

}  // namespace shoestring
