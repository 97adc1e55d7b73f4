#include "optim/base.h"

namespace shoestring::optim {
namespace {

using namespace detail;

template <class State>
auto parts_of(State& s) {
  return Parts<std::remove_reference_t<decltype(s.step())>>{
      {"step", &s.step()},
      {"exp_avg", &s.exp_avg()},
      {"exp_avg_scale", &s.exp_avg_scale()}};
}

struct LionRule final : TypedRule<LionOptions, LionParamState> {
  using TypedRule::TypedRule;

  Parts<Tensor> parts(OptimizerParamState& state) const override {
    return parts_of(static_cast<LionParamState&>(state));
  }

  void check_own(const LionOptions& o) const override {
    fractions(o.betas());
  }

  Operator operator_own(const LionOptions& o) const override {
    const auto [beta1, beta2] = o.betas();
    return {"lion_", {{"beta1", beta1}, {"beta2", beta2}}};
  }
};

constexpr LionRule kRule("Lion");

}  // namespace

void LionOptions::serialize(OutputArchive& archive) const {
  archive.write("lr", c10::IValue(lr()));
  const auto [beta1, beta2] = betas();
  archive.write("beta1", c10::IValue(beta1));
  archive.write("beta2", c10::IValue(beta2));
  archive.write("weight_decay", c10::IValue(weight_decay()));
  archive.write("state", c10::IValue(state()));
  archive.write("maximize", c10::IValue(maximize()));
}

void LionOptions::serialize(InputArchive& archive) {
  lr(read(archive, "lr").toDouble());
  betas({read(archive, "beta1").toDouble(), read(archive, "beta2").toDouble()});
  weight_decay(read(archive, "weight_decay").toDouble());
  state(read(archive, "state").toStringRef());
  maximize(read(archive, "maximize").toBool());
}

void LionParamState::serialize(OutputArchive& archive) const { save_parts(archive, parts_of(*this)); }
void LionParamState::serialize(InputArchive& archive) { load_parts(archive, parts_of(*this)); }

Lion::Lion(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, LionOptions defaults)
    : LowMemoryOptimizer(kRule, param_groups, std::make_unique<LionOptions>(std::move(defaults))) {}

}  // namespace shoestring::optim
