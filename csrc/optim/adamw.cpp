#include "optim/base.h"

namespace shoestring::optim {
namespace {

using namespace detail;

template <class State>
auto parts_of(State& s) {
  return Parts<std::remove_reference_t<decltype(s.step())>>{
      {"step", &s.step()},
      {"exp_avg", &s.exp_avg()},
      {"exp_avg_scale", &s.exp_avg_scale()},
      {"exp_avg_sq", &s.exp_avg_sq()},
      {"exp_avg_sq_scale", &s.exp_avg_sq_scale()}};
}

struct AdamWRule final : TypedRule<AdamWOptions, AdamWParamState> {
  using TypedRule::TypedRule;

  Parts<Tensor> parts(OptimizerParamState& state) const override {
    return parts_of(static_cast<AdamWParamState&>(state));
  }

  void check_own(const AdamWOptions& o) const override {
    fractions(o.betas());
    at_least_zero("eps", o.eps());
  }

  Operator operator_own(const AdamWOptions& o) const override {
    const auto [beta1, beta2] = o.betas();
    return {"adamw_", {{"beta1", beta1}, {"beta2", beta2}, {"eps", o.eps()}}};
  }
};

constexpr AdamWRule kRule("AdamW");

}  // namespace

void AdamWOptions::serialize(OutputArchive& archive) const {
  archive.write("lr", c10::IValue(lr()));
  const auto [beta1, beta2] = betas();
  archive.write("beta1", c10::IValue(beta1));
  archive.write("beta2", c10::IValue(beta2));
  archive.write("eps", c10::IValue(eps()));
  archive.write("weight_decay", c10::IValue(weight_decay()));
  archive.write("state", c10::IValue(state()));
  archive.write("maximize", c10::IValue(maximize()));
}

void AdamWOptions::serialize(InputArchive& archive) {
  lr(read(archive, "lr").toDouble());
  betas({read(archive, "beta1").toDouble(), read(archive, "beta2").toDouble()});
  eps(read(archive, "eps").toDouble());
  weight_decay(read(archive, "weight_decay").toDouble());
  state(read(archive, "state").toStringRef());
  maximize(read(archive, "maximize").toBool());
}

void AdamWParamState::serialize(OutputArchive& archive) const { save_parts(archive, parts_of(*this)); }
void AdamWParamState::serialize(InputArchive& archive) { load_parts(archive, parts_of(*this)); }

AdamW::AdamW(const std::vector<torch::optim::OptimizerParamGroup>& param_groups, AdamWOptions defaults)
    : LowMemoryOptimizer(kRule, param_groups, std::make_unique<AdamWOptions>(std::move(defaults))) {}

}  // namespace shoestring::optim
