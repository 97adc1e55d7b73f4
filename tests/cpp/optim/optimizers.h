#pragma once

// Helpers for the tests of all optimizers.

#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <shoestring/optim.h>

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// Returns four parameters. The first has fewer elements than a SIMD register, and the last has none. The
// second fills one quantisation block and a part of another one; the third has many blocks.
inline std::vector<at::Tensor> parameters(at::ScalarType dtype = at::kFloat) {
  at::manual_seed(3);
  std::vector<at::Tensor> params;
  for (int64_t size : {1, 300, 5000, 0}) params.push_back(at::randn({size}).to(dtype).requires_grad_());
  return params;
}

// Returns the tensors of parameters() as matrices.
inline std::vector<at::Tensor> matrices(at::ScalarType dtype = at::kFloat) {
  std::vector<at::Tensor> params;
  for (const at::Tensor& p : parameters()) {
    params.push_back(p.detach().view({p.numel() < 100 ? 1 : 10, -1}).to(dtype).requires_grad_());
  }
  return params;
}

inline void new_gradients(const std::vector<at::Tensor>& params, int step) {
  at::manual_seed(100 + step);
  for (const at::Tensor& p : params) p.mutable_grad() = at::randn(p.sizes()).to(p.scalar_type());
}

inline void train(torch::optim::Optimizer& opt, const std::vector<at::Tensor>& params, int from, int to) {
  for (int step = from; step < to; ++step) {
    new_gradients(params, step);
    opt.step();
  }
}

inline std::vector<at::Tensor> clones(const std::vector<at::Tensor>& params) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& p : params) all.push_back(p.detach().clone());
  return all;
}

inline at::Tensor number(double x) { return at::full({}, x, at::kFloat); }

// Splits the four parameters of parameters() or matrices() into two groups.
inline Groups two_groups(const std::vector<at::Tensor>& p) { return {{{p[0], p[1]}}, {{p[2], p[3]}}}; }

inline void copy(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
  for (size_t i = 0; i < from.size(); ++i) to[i].detach().copy_(from[i].detach());
}

inline bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) same = at::equal(a[i], b[i]);
  return same;
}

inline const shoestring::optim::ParamState& state_of(torch::optim::Optimizer& opt, const at::Tensor& p) {
  return static_cast<const shoestring::optim::ParamState&>(*opt.state().at(p.unsafeGetTensorImpl()));
}

inline std::string archived(const torch::optim::Optimizer& opt) {
  std::stringstream file;
  torch::serialize::OutputArchive out;
  opt.save(out);
  out.save_to(file);
  return file.str();
}

inline void load_archive(torch::optim::Optimizer& opt, const std::string& bytes) {
  std::stringstream file(bytes);
  torch::serialize::InputArchive in;
  in.load_from(file);
  opt.load(in);
}

// Builds optimizers of one class: one with options that all differ from their defaults, and one with default
// options.
struct RuleCase {
  using Make = std::function<std::unique_ptr<shoestring::optim::LowMemoryOptimizer>(const Groups&)>;
  std::string name;
  std::function<std::unique_ptr<shoestring::optim::LowMemoryOptimizer>(
      const Groups&, const std::string& state, const std::string& weights)>
      make;
  Make with_defaults;
};

template <class Optimizer, class Options>
RuleCase rule_case(const std::string& name, const Options& set) {
  return {
      name,
      [set](const Groups& groups, const std::string& state, const std::string& weights) {
        return std::make_unique<Optimizer>(
            groups,
            Options(set).state_format(state).weight_rounding(weights).seed(1 << 20).min_quantize_size(10));
      },
      [](const Groups& groups) { return std::make_unique<Optimizer>(groups); }};
}

inline std::vector<RuleCase> rule_cases() {
  using namespace shoestring::optim;
  return {
      rule_case<AdamW>("AdamW",
                       AdamWOptions(3e-3).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.3).maximize(true)),
      rule_case<Lion>("Lion", LionOptions(3e-3).betas({0.7, 0.9}).weight_decay(0.3).maximize(true)),
      rule_case<SGD>("SGD", SGDOptions(3e-2).momentum(0.7).dampening(0.2).weight_decay(0.3).maximize(true)),
      rule_case<SGD>("SGD", SGDOptions(3e-2).nesterov(true)),
      rule_case<AdEMAMix>("AdEMAMix",
                          AdEMAMixOptions(3e-3).betas({0.8, 0.95, 0.99}).alpha(2).t_alpha(5).t_beta3(4)),
      rule_case<ScheduleFreeAdamW>("ScheduleFreeAdamW", ScheduleFreeAdamWOptions(3e-3)
                                                            .betas({0.8, 0.95})
                                                            .eps(1e-6)
                                                            .weight_decay(0.3)
                                                            .warmup_steps(4)
                                                            .maximize(true)),
      rule_case<LAMB>("LAMB",
                      LAMBOptions(3e-3).betas({0.8, 0.95}).eps(1e-5).weight_decay(0.3).maximize(true)),
      rule_case<Adafactor>("Adafactor", AdafactorOptions(3e-3).eps({1e-5, 1e-2}).d(2).weight_decay(0.3)),
      rule_case<Adafactor>("Adafactor with a mean", AdafactorOptions(3e-3).beta1(0.8).beta2_decay(-0.7)),
      rule_case<CAME>(
          "CAME",
          CAMEOptions(3e-3).betas({0.8, 0.95, 0.9}).eps({1e-20, 1e-10}).clip_threshold(2).weight_decay(0.3)),
      rule_case<Muon>("Muon", MuonOptions(3e-3)
                                  .momentum(0.8)
                                  .nesterov(false)
                                  .ns_steps(3)
                                  .eps(1e-5)
                                  .weight_decay(0.3)
                                  .ns_coefficients({3, -4, 2})
                                  .adjust_lr_fn("match_rms_adamw"))};
}

constexpr const char* kStates[] = {"8bit", "4bit", "bf16", "fp32"};
constexpr const char* kRoundings[] = {"nearest", "stochastic", "remainder"};
