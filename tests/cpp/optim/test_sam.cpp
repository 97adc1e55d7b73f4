#include <shoestring/optim.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <cmath>
#include <limits>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "catch.h"
#include "optim/optimizers.h"

using at::Tensor;
using Catch::Contains;
using shoestring::optim::AdamW;
using shoestring::optim::AdamWOptions;
using shoestring::optim::GaLore;
using shoestring::optim::GaLoreOptions;
using shoestring::optim::SAM;
using shoestring::optim::SAMOptions;

namespace {

std::vector<Tensor> network(at::ScalarType dtype = at::kFloat) {
  at::manual_seed(3);
  std::vector<Tensor> params{at::randn({12, 20}).to(dtype), at::randn({20}).to(dtype),
                             at::randn({20, 1}).to(dtype)};
  for (Tensor& p : params) p.requires_grad_();
  return params;
}

std::pair<Tensor, Tensor> batch(int step) {
  at::manual_seed(100 + step);
  const Tensor x = at::randn({64, 12});
  return {x, at::randn({64, 1})};
}

Tensor loss_of(const std::vector<Tensor>& p, const Tensor& x, const Tensor& y) {
  const auto type = x.scalar_type();
  return (at::mm((at::mm(x, p[0].to(type)) + p[1].to(type)).tanh(), p[2].to(type)) - y).square().mean();
}

Tensor half(const std::vector<Tensor>& params, int step) {
  const auto [x, y] = batch(step);
  const Tensor loss = loss_of(params, x, y);
  torch::autograd::backward({loss}, {});
  return loss.detach();
}

void train(SAM& opt, const std::vector<Tensor>& params, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    half(params, step);
    opt.first_step();
    opt.zero_grad();
    half(params, step);
    opt.second_step();
    opt.zero_grad();
  }
}

bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return true;
}

std::vector<Tensor> gradients(const std::vector<Tensor>& values, int step) {
  std::vector<Tensor> leaves;
  for (const Tensor& v : values) leaves.push_back(v.detach().clone().requires_grad_());
  const auto [x, y] = batch(step);
  return torch::autograd::grad({loss_of(leaves, x.to(at::kDouble), y.to(at::kDouble))}, leaves);
}

std::unique_ptr<torch::optim::Optimizer> sgd(const std::vector<Tensor>& params, double lr) {
  return std::make_unique<torch::optim::SGD>(params, torch::optim::SGDOptions(lr).momentum(0.8));
}

}  // namespace

TEST_CASE("SAM agrees with fp64", "[sam]") {
  for (bool adaptive : {false, true}) {
    CAPTURE(adaptive);
    auto params = network();
    SAM opt(sgd(params, 0.05), SAMOptions(0.2).adaptive(adaptive));
    std::vector<Tensor> exact, momentum;
    for (const Tensor& p : params) {
      exact.push_back(p.detach().to(at::kDouble));
      momentum.push_back(at::zeros_like(exact.back()));
    }
    for (int step = 0; step < 6; ++step) {
      const auto first = gradients(exact, step);
      double squares = 0;
      for (size_t i = 0; i < 3; ++i)
        squares += (adaptive ? first[i] * exact[i] : first[i]).square().sum().item<double>();
      std::vector<Tensor> up;
      for (size_t i = 0; i < 3; ++i) {
        const Tensor direction = adaptive ? first[i] * exact[i] * exact[i] : first[i];
        up.push_back(exact[i] + 0.2 / std::sqrt(squares) * direction);
      }
      const auto second = gradients(up, step);
      for (size_t i = 0; i < 3; ++i) {
        momentum[i] = 0.8 * momentum[i] + second[i];
        exact[i] = exact[i] - 0.05 * momentum[i];
      }
      half(params, step);
      opt.first_step();
      if (step == 0)
        CHECK(((params[0].detach() - up[0]).norm() / (network()[0].detach() - up[0]).norm()).item<double>() <
              1e-4);
      opt.zero_grad();
      half(params, step);
      opt.second_step();
      opt.zero_grad();
    }
    for (size_t i = 0; i < 3; ++i)
      CHECK(((params[i].detach() - exact[i]).norm() / exact[i].norm()).item<double>() < 1e-5);
  }
}

TEST_CASE("SAM: weights come back to the bit", "[sam]") {
  for (auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (bool adaptive : {false, true}) {
      CAPTURE(dtype, adaptive);
      auto params = network(dtype);
      const auto before = clones(params);
      SAM opt(sgd(params, 0), SAMOptions(0.3).adaptive(adaptive));
      for (int step = 0; step < 3; ++step) {
        half(params, step);
        params[1].mutable_grad() = Tensor();
        opt.first_step();
        CHECK(!at::equal(params[0], before[0]));
        CHECK(at::equal(params[1], before[1]));
        opt.zero_grad();
        half(params, step);
        opt.second_step();
        opt.zero_grad();
        CHECK(same(params, before));
      }
    }
  }
}

TEST_CASE("SAM: closures are called twice, micro-batches add up, and a failure up there leaves the weights",
          "[sam]") {
  auto ours = network(), theirs = network(), parts = network();
  SAM a(std::make_unique<AdamW>(ours, AdamWOptions(1e-2)), SAMOptions(0.2));
  SAM b(std::make_unique<AdamW>(theirs, AdamWOptions(1e-2)), SAMOptions(0.2));
  SAM c(std::make_unique<torch::optim::AdamW>(parts, torch::optim::AdamWOptions(1e-2)), SAMOptions(0.2));
  auto whole = network();
  SAM d(std::make_unique<torch::optim::AdamW>(whole, torch::optim::AdamWOptions(1e-2)), SAMOptions(0.2));
  for (int step = 0; step < 3; ++step) {
    std::vector<double> losses;
    a.zero_grad();
    const Tensor loss = a.step([&] {
      const Tensor l = half(ours, step);
      losses.push_back(l.item<double>());
      return l;
    });
    train(b, theirs, step, step + 1);
    CHECK(losses.size() == 2);
    CHECK(losses[0] < losses[1]);
    CHECK(loss.item<double>() == losses[0]);

    const auto [x, y] = batch(step);
    const auto xs = x.chunk(4), ys = y.chunk(4);
    for (int part = 0; part < 2; ++part) {
      for (size_t i = 0; i < 4; ++i) torch::autograd::backward({loss_of(parts, xs[i], ys[i]) / 4}, {});
      if (part == 0) {
        c.first_step();
      } else {
        c.second_step();
      }
      c.zero_grad();
    }
    train(d, whole, step, step + 1);
    for (size_t i = 0; i < 3; ++i)
      CHECK(((parts[i] - whole[i]).norm() / whole[i].norm()).item<double>() < 1e-4);
  }
  CHECK(same(ours, theirs));
  const auto before = clones(ours);
  int calls = 0;
  a.zero_grad();
  const auto fails = [&]() -> Tensor {
    if (++calls == 2) throw std::runtime_error("no second pass");
    return half(ours, 0);
  };
  CHECK_THROWS_WITH(a.step(fails), Contains("no second pass"));
  CHECK(same(ours, before));
  train(a, ours, 5, 6);  // training continues normally after the failed step
}

TEST_CASE("SAM resumes bit for bit, and follows schedules", "[sam]") {
  auto through = network(), resumed = network();
  const auto make = [](std::vector<Tensor>& params, double lr) {
    return std::make_unique<GaLore<AdamW>>(params, AdamWOptions(lr),
                                           GaLoreOptions().rank(8).update_proj_gap(2));
  };
  SAM opt(make(through, 1e-2), SAMOptions(0.2).adaptive(true)), other(make(resumed, 1), SAMOptions(0.7));
  torch::optim::StepLR schedule(opt, 1, 0.5);
  train(opt, through, 0, 3);
  // the first call of schedule.step() does not change lr in LibTorch
  for (int i = 0; i < 2; ++i) schedule.step();
  std::stringstream file;
  torch::serialize::OutputArchive out;
  opt.save(out);
  out.save_to(file);
  for (size_t i = 0; i < 3; ++i) resumed[i].detach().copy_(through[i].detach());
  torch::serialize::InputArchive in;
  in.load_from(file);
  other.load(in);
  CHECK(other.options().rho() == 0.2);
  CHECK(other.options().adaptive());
  CHECK(other.param_groups()[0].options().get_lr() == 5e-3);
  train(opt, through, 3, 6);
  train(other, resumed, 3, 6);
  CHECK(same(through, resumed));
  CHECK(opt.base().param_groups()[0].options().get_lr() == 5e-3);
}

TEST_CASE("SAM with an interval takes the base optimizer's steps between, also after it resumes", "[sam]") {
  auto ours = network(), theirs = network();
  SAM opt(sgd(ours, 0.1), SAMOptions(0.2).interval(3)), whole(sgd(theirs, 0.1), SAMOptions(0.2));
  const auto take = [](SAM& sam, const std::vector<Tensor>& params, int step) {
    half(params, step);
    const bool moved = sam.first_step();
    if (moved) {
      sam.zero_grad();
      half(params, step);
    }
    sam.second_step();
    sam.zero_grad();
    return moved;
  };
  for (int step = 0; step < 5; ++step) {
    CHECK(take(opt, ours, step) == (step % 3 == 0));
    if (step % 3 == 0) {
      take(whole, theirs, step);
    } else {
      half(theirs, step);
      whole.base().step();
      whole.zero_grad();
    }
    CHECK(same(ours, theirs));
  }
  std::stringstream file;
  torch::serialize::OutputArchive out;
  opt.save(out);
  out.save_to(file);
  auto resumed = clones(ours);
  for (Tensor& p : resumed) p.requires_grad_();
  SAM other(sgd(resumed, 0.1));
  torch::serialize::InputArchive in;
  in.load_from(file);
  other.load(in);
  CHECK(other.options().interval() == 3);
  for (int step = 5; step < 8; ++step) {
    CHECK(take(other, resumed, step) == (step == 6));
    take(opt, ours, step);
  }
  CHECK(same(ours, resumed));
  int calls = 0;
  for (int step = 8; step < 11; ++step) {
    opt.step([&] {
      ++calls;
      opt.zero_grad();
      return half(ours, step);
    });
  }
  CHECK(calls == 4);
  half(ours, 0);
  CHECK_THROWS_WITH(SAM(sgd(ours, 0), SAMOptions().interval(0)),
                    Contains("SAM: interval: expected a number of at least 1, received 0"));
}

TEST_CASE("SAM of an offloaded optimizer does the same", "[sam]") {
  const auto device = network(at::kBFloat16), host = network(at::kBFloat16);
  const auto make = [](const std::vector<Tensor>& params, const std::optional<std::string>& where) {
    auto base = std::make_unique<AdamW>(params, AdamWOptions(0.1).weight_rounding("remainder"));
    base->set_offload(where);
    return SAM(std::move(base), SAMOptions(0.2));
  };
  for (const char* where : {"stream", "cpu"}) {
    SAM one = make(device, std::nullopt), other = make(host, where);
    train(one, device, 0, 3);
    train(other, host, 0, 3);
    CHECK(same(device, host));
  }
}

TEST_CASE("SAM refuses what is not due, and does not go up along what is not finite", "[sam]") {
  auto params = network();
  const auto before = clones(params);
  SAM opt(sgd(params, 0));
  CHECK_THROWS_WITH(opt.second_step(),
                    Contains("SAM: second_step: expected first_step() before, received none"));
  CHECK_THROWS_WITH(opt.step(), Contains("SAM: second_step: expected first_step() before"));
  half(params, 0);
  params[0].mutable_grad()[0][0] = std::numeric_limits<float>::infinity();
  opt.first_step();
  CHECK(same(params, before));
  CHECK_THROWS_WITH(opt.first_step(), Contains("SAM: first_step: expected second_step() after first_step()"));
  CHECK_THROWS_WITH(opt.step([] { return Tensor(); }), Contains("SAM: step: expected second_step()"));
  torch::serialize::OutputArchive out;
  CHECK_THROWS_WITH(opt.save(out), Contains("SAM: save: expected second_step()"));
  opt.zero_grad();
  opt.second_step();
  CHECK_THROWS_WITH(SAM(nullptr), Contains("SAM: base: expected an optimizer, received none"));
  CHECK_THROWS_WITH(SAM(sgd(params, 0), SAMOptions(-1)),
                    Contains("SAM: rho: expected a number of at least 0, received -1"));

  AdamW plain(params);
  std::stringstream file;
  torch::serialize::OutputArchive foreign;
  plain.save(foreign);
  foreign.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  CHECK_THROWS_WITH(opt.load(in),
                    Contains("SAM: load: expected an archive of this optimizer, received another one"));
}
