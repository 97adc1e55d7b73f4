// Registers the class LowRankCore, with which Python's GaLore and APOLLO step. The base optimizer steps
// between begin() and finish(). The state of the parameters belongs to Python, which passes it to begin() and
// takes it from states().

#include <torch/csrc/autograd/grad_mode.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "optim/core/values.h"
#include "optim/split/split_params.h"
#include "optim/wrappers/low_rank_step.h"

namespace shoestring::optim {
namespace {

using namespace detail;

const Method& method_of(const std::string& name) {
  for (const Method* method : {&galore(), &apollo()}) {
    if (name == method->name) return *method;
  }
  TORCH_CHECK(false, "LowRankCore: expected GaLore or APOLLO, received ", name);
}

class LowRankHolder : public torch::CustomClassHolder {
 public:
  LowRankHolder(const std::string& method, std::string label) : step_(method_of(method), std::move(label)) {}

  /// Adds a group. Returns the stand-in of each parameter; none for a parameter that is not projected. A
  /// parameter that is a shard has the names of its process groups in `split`; see set_splits.
  std::vector<std::optional<Tensor>> add_group(const std::vector<Tensor>& params, const Options& values,
                                               const std::vector<std::vector<std::string>>& split,
                                               const std::vector<int64_t>& pieces,
                                               const std::vector<std::vector<int64_t>>& sizes,
                                               const std::vector<std::vector<int64_t>>& begins,
                                               at::Device device) {
    LowRankOptions options;
    read(values, options);
    set_splits(params, split, pieces, sizes, begins, device.type());
    std::vector<std::optional<Tensor>> lows;
    for (const Tensor& low : step_.add(params, options)) {
      lows.push_back(low.defined() ? std::optional<Tensor>(low) : std::nullopt);
    }
    return lows;
  }
  void pop_group() { step_.groups.pop_back(); }
  void replace_params(int64_t group, const std::vector<Tensor>& params) {
    step_.replace_params(static_cast<size_t>(group), params);
  }

  /// Returns an empty tensor without memory, with the dtype and the shape of the tensor that is stored for
  /// each projected parameter of a group.
  std::vector<Tensor> kept_like(int64_t group) {
    const LowRankStep::Group& g = step_.groups.at(static_cast<size_t>(group));
    std::vector<Tensor> result;
    for (const Projected& p : g.projected) {
      const auto [dtype, shape] = step_.method.kept_as(p, g.options);
      result.push_back(at::empty(shape, at::TensorOptions(at::kMeta).dtype(dtype)));
    }
    return result;
  }

  /// `options` and `states` hold an entry for each group. The states are those of the projected parameters;
  /// empty for a parameter without state.
  std::optional<Tensor> begin(const std::vector<Options>& options,
                              const std::vector<std::vector<Options>>& states,
                              std::optional<double> max_grad_norm) {
    const at::NoGradGuard no_grad;
    for (size_t g = 0; g < step_.groups.size(); ++g) {
      LowRankStep::Group& group = step_.groups[g];
      read(options.at(g), group.options);
      group.base = {};
      const c10::IValue lr = options[g].at("lr");
      if (lr.isTensor()) {
        group.base.lr_tensor = lr.toTensor();
      } else {
        get(options[g], "lr", group.base.lr);
      }
      get(options[g], "weight_decay", group.base.weight_decay);
      get(options[g], "maximize", group.base.maximize);
      for (size_t i = 0; i < group.projected.size(); ++i) {
        Projected& p = group.projected[i];
        const Options& state = states.at(g).at(i);
        if (state.empty()) continue;
        p.kept = state.at(step_.method.kept).toTensor();
        p.age = state.at("projection_age").toInt();
        p.seed = state.at("seed").toInt();
      }
    }
    const Tensor norm = step_.begin(max_grad_norm);
    return norm.defined() ? std::optional<Tensor>(norm) : std::nullopt;
  }
  void finish() {
    const at::NoGradGuard no_grad;
    step_.finish();
  }
  void release() {
    const at::NoGradGuard no_grad;
    step_.release();
  }

  /// Returns the state of the projected parameters of each group; empty for a parameter without state.
  std::vector<std::vector<Options>> states() {
    std::vector<std::vector<Options>> all_states;
    for (const LowRankStep::Group& group : step_.groups) {
      auto& states = all_states.emplace_back();
      for (const Projected& p : group.projected) {
        Options& state = states.emplace_back(empty_options());
        if (!p.kept.defined()) continue;
        state.insert(step_.method.kept, p.kept);
        state.insert("projection_age", p.age);
        state.insert("seed", p.seed);
      }
    }
    return all_states;
  }

 private:
  template <class T>
  void get(const Options& values, const char* option, T& to) const {
    TORCH_CHECK_VALUE(read_value(values.at(option), to), step_.name, ": ", option,
                      ": expected a value of the type of its default, received another type");
  }
  void read(const Options& values, LowRankOptions& to) const {
    get(values, "rank", to.rank);
    get(values, "update_proj_gap", to.update_proj_gap);
    get(values, "scale", to.scale);
    get(values, step_.method.kind, to.kind);
    get(values, "seed", to.seed);
  }

  LowRankStep step_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<LowRankHolder>("LowRankCore")
      .def(torch::init<std::string, std::string>())
      .def("add_group", &LowRankHolder::add_group)
      .def("pop_group", &LowRankHolder::pop_group)
      .def("replace_params", &LowRankHolder::replace_params)
      .def("kept_like", &LowRankHolder::kept_like)
      .def("begin", &LowRankHolder::begin)
      .def("finish", &LowRankHolder::finish)
      .def("release", &LowRankHolder::release)
      .def("states", &LowRankHolder::states);
}

}  // namespace shoestring::optim
