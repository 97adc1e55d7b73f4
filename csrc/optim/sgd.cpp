#include <cmath>

#include "optim/base.h"

namespace shoestring::optim {
namespace {

using namespace detail;

template <class State>
auto parts_of(State& s) {
  return Parts<std::remove_reference_t<decltype(s.step())>>{
      {"step", &s.step()},
      {"momentum_buffer", &s.momentum_buffer()},
      {"momentum_buffer_scale", &s.momentum_buffer_scale()}};
}

struct SGDRule final : TypedRule<SGDOptions, SGDParamState> {
  using TypedRule::TypedRule;

  Parts<Tensor> parts(OptimizerParamState& state) const override {
    return parts_of(static_cast<SGDParamState&>(state));
  }

  void check_own(const SGDOptions& o) const override {
    TORCH_CHECK(o.momentum() > 0, "shoestring::optim::SGD: momentum: expected a number above 0 (without momentum use ",
                "torch::optim::SGD), received ", o.momentum());
    TORCH_CHECK(std::isfinite(o.dampening()), "shoestring::optim::SGD: dampening: expected a finite number, received ",
                o.dampening());
    TORCH_CHECK(!o.nesterov() || o.dampening() == 0,
                "shoestring::optim::SGD: dampening: expected 0 with nesterov, received ", o.dampening());
  }

  Operator operator_own(const SGDOptions& o) const override {
    return {"sgd_", {{"momentum", o.momentum()}, {"dampening", o.dampening()}, {"nesterov", o.nesterov()}}};
  }
};

constexpr SGDRule kRule("SGD");

}  // namespace

void SGDOptions::serialize(OutputArchive& archive) const {
  archive.write("lr", c10::IValue(lr()));
  archive.write("momentum", c10::IValue(momentum()));
  archive.write("dampening", c10::IValue(dampening()));
  archive.write("weight_decay", c10::IValue(weight_decay()));
  archive.write("nesterov", c10::IValue(nesterov()));
  archive.write("state", c10::IValue(state()));
  archive.write("maximize", c10::IValue(maximize()));
}

void SGDOptions::serialize(InputArchive& archive) {
  lr(read(archive, "lr").toDouble());
  momentum(read(archive, "momentum").toDouble());
  dampening(read(archive, "dampening").toDouble());
  weight_decay(read(archive, "weight_decay").toDouble());
  nesterov(read(archive, "nesterov").toBool());
  state(read(archive, "state").toStringRef());
  maximize(read(archive, "maximize").toBool());
}

void SGDParamState::serialize(OutputArchive& archive) const { save_parts(archive, parts_of(*this)); }
void SGDParamState::serialize(InputArchive& archive) { load_parts(archive, parts_of(*this)); }

SGD::SGD(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, SGDOptions defaults)
    : LowMemoryOptimizer(kRule, param_groups, std::make_unique<SGDOptions>(std::move(defaults))) {}

}  // namespace shoestring::optim
