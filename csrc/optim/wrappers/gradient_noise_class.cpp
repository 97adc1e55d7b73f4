// Registers the class GradientNoise for Python.

#include <torch/custom_class.h>
#include <torch/library.h>

#include <shoestring/optim/gradient_noise.h>

#include "optim/core/state_entries.h"
#include "optim/wrappers/gradient_noise_core.h"

namespace shoestring::optim {
namespace {

struct NoiseHolder : torch::CustomClassHolder {
  explicit NoiseHolder(double decay) : averages(decay) {}

  void observe(const at::Tensor& square, double rows, const at::Tensor& all_square, double all_rows) {
    averages.observe(square, rows, all_square, all_rows);
  }
  double noise() { return averages.noise(); }
  double square() { return averages.square(); }
  double critical_batch() { return averages.critical_batch(); }
  detail::StateEntries state() { return detail::entries_of(averages.state()); }
  void load_state(const detail::StateEntries& entries) { averages.load_state(detail::state_of(entries)); }

  detail::NoiseAverages averages;
};

double scaled_lr(double lr, double base_batch, double batch, std::string rule,
                 std::optional<double> critical_batch) {
  return scale_lr(lr, base_batch, batch, rule, critical_batch);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<NoiseHolder>("GradientNoise")
      .def(torch::init<double>())
      .def("observe", &NoiseHolder::observe)
      .def("noise", &NoiseHolder::noise)
      .def("square", &NoiseHolder::square)
      .def("critical_batch", &NoiseHolder::critical_batch)
      .def("state", &NoiseHolder::state)
      .def("load_state", &NoiseHolder::load_state)
      .def_static("scale_lr", &scaled_lr);
}

}  // namespace shoestring::optim
