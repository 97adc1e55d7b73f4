// Tests optimizers whose state is in host memory or in a file on disk. The results must not depend on how
// long transfers take, or how they are split.

#include "catch.h"

#include <sys/mount.h>

#include <cerrno>
#include <random>
#include <set>

#include <torch/csrc/autograd/custom_function.h>

#include "child.h"
#include "folder.h"
#include "offload/disturbed.h"
#include "offload/state.h"
#include "optim/optimizers.h"

using at::Tensor;
using Catch::Contains;
using namespace shoestring::optim;
using shoestring::offload::Offload;
using shoestring::offload::State;

namespace {

Groups groups_of(const std::vector<Tensor>& p) { return {{{p[2], p[0]}}, {{p[1], p[3]}}}; }

std::vector<Tensor> params_of(const RuleCase& rule, at::ScalarType dtype) {
  return rule.name == "SGD" ? parameters(dtype) : matrices(dtype);
}

void check_same(LowMemoryOptimizer& a, const std::vector<Tensor>& p, LowMemoryOptimizer& b,
                const std::vector<Tensor>& q) {
  CHECK(equal(p, q));
  CHECK(a.state().size() == b.state().size());
  for (size_t i = 0; i < p.size(); ++i) {
    for (const auto& [name, tensor] : state_of(a, p[i]).tensors()) {
      CAPTURE(name, i);
      CHECK(at::equal(tensor, state_of(b, q[i])[name]));
    }
  }
}

}  // namespace

TEST_CASE("every optimizer does the same with its state offloaded", "[offload]") {
  const Folder folder;
  const Disturbed slow({.max_delay_us = 100, .short_transfers = true});
  for (const RuleCase& rule : rule_cases()) {
    for (const std::string state : {"8bit", "fp32"}) {
      for (const std::string place : {std::string("cpu"), std::string("stream"), "nvme:" + folder.path}) {
        for (const std::string weights : {"nearest", "remainder"}) {
          CAPTURE(rule.name, state, place, weights);
          const auto device = params_of(rule, at::kBFloat16), offloaded = params_of(rule, at::kBFloat16);
          const auto one = rule.make(groups_of(device), state, weights),
                     other = rule.make(groups_of(offloaded), state, weights);
          other->set_offload(place);
          for (auto* opt : {one.get(), other.get()}) opt->set_max_grad_norm(20);
          train(*one, device, 0, 4);
          train(*other, offloaded, 0, 4);
          check_same(*one, device, *other, offloaded);
          if (auto* averages = dynamic_cast<ScheduleFreeAdamW*>(other.get())) {
            averages->eval();
            static_cast<ScheduleFreeAdamW&>(*one).eval();
            CHECK(equal(device, offloaded));
          }
        }
      }
    }
  }
}

TEST_CASE("state moves, and checkpoints are the same wherever it lies", "[offload]") {
  const Folder folder;
  const std::string path = folder / "optimizer.safetensors", disk = "nvme:" + folder.path;
  const auto through = parameters(at::kBFloat16), moved = parameters(at::kBFloat16),
             resumed = parameters(at::kBFloat16);
  const auto make = [](const std::vector<Tensor>& params) {
    return AdamW(groups_of(params), AdamWOptions(1e-2).weight_rounding("remainder"));
  };
  AdamW one = make(through), two = make(moved), three = make(resumed);
  three.set_offload("stream");
  train(one, through, 0, 6);
  train(two, moved, 0, 2);
  two.set_offload(disk);
  train(two, moved, 2, 3);
  two.set_offload("cpu");
  train(two, moved, 3, 4);
  two.set_offload(disk);
  copy(moved, resumed);
  save_optimizer(two, path);
  load_optimizer(three, path);
  train(three, resumed, 4, 6);
  check_same(one, through, three, resumed);
  two.set_offload(std::nullopt);
  load_archive(two, archived(two));
  train(two, moved, 4, 6);
  check_same(one, through, two, moved);
  CHECK(folder.files() == std::vector<std::string>{"optimizer.safetensors"});
}

TEST_CASE("sums of micro-batches and steps within backward, offloaded", "[offload]") {
  const Folder folder;
  const Disturbed slow({.max_delay_us = 100});
  for (const bool in_backward : {false, true}) {
    for (const std::string place : {std::string("cpu"), std::string("stream"), "nvme:" + folder.path}) {
      CAPTURE(in_backward, place);
      // With offload to "cpu", gradients are clipped by the norm of all gradients of the step. With offload
      // to "stream" or to a file, and with step_in_backward, they are clipped by the norm of the previous
      // step's gradients.
      const bool exact = place == "cpu";
      const auto device = parameters(), offloaded = parameters();
      AdEMAMix one(groups_of(device)), other(groups_of(offloaded));
      other.set_offload(place);
      const auto run = [&](AdEMAMix& opt, const std::vector<Tensor>& params, bool in_backward) {
        opt.set_step_in_backward(in_backward);
        opt.set_max_grad_norm(9);
        at::manual_seed(5);
        for (int step = 0; step < 4; ++step) {
          for (int micro = 0; micro < 3; ++micro) {
            const auto sums = micro < 2 ? opt.accumulate() : nullptr;
            Tensor loss = at::zeros({});
            for (const Tensor& p : params) loss = loss + (p * at::randn(p.sizes())).sum();
            loss.backward();
          }
          opt.step();
          opt.zero_grad();
        }
      };
      run(one, device, in_backward && !exact);
      run(other, offloaded, in_backward);
      CHECK(at::equal(one.grad_norm(), other.grad_norm()));
      check_same(one, device, other, offloaded);
    }
  }
}

TEST_CASE("a step that fails can be repeated, with its own gradients alone", "[offload]") {
  const Folder folder;
  // The step fails after `after` reads and writes of the swap file. It needs more of them than the largest
  // value of `after`.
  for (const int after : {0, 3, 6, 9, 14}) {
    CAPTURE(after);
    const auto device = parameters(), offloaded = parameters();
    AdamW one(groups_of(device)), other(groups_of(offloaded));
    other.set_offload("nvme:" + folder.path);
    train(one, device, 0, 3);
    train(other, offloaded, 0, 2);
    const Disturbed bad({.fail_after = after, .error = EIO});
    new_gradients(offloaded, 2);
    CHECK_THROWS_WITH(other.step(), Contains("AdamW: offload: " + folder.path + "/shoestring-swap-") &&
                                        Contains("bytes at ") && Contains("Input/output error"));
    CHECK(state_of(other, offloaded[2])["step"].item<float>() == 2);
    other.step();
    check_same(one, device, other, offloaded);
  }
}

TEST_CASE("after a step that failed another one goes on, or says what to load", "[offload]") {
  const Folder folder;
  std::set<std::string> outcomes;
  for (const bool zeroed : {false, true}) {
    for (int after = 0; after < 16; after += 2) {
      CAPTURE(after, zeroed);
      const auto params = parameters(), without = parameters(), with = parameters();
      AdamW opt(groups_of(params)), one(groups_of(without)), other(groups_of(with));
      opt.set_offload("nvme:" + folder.path);
      train(opt, params, 0, 2);
      train(one, without, 0, 2);
      train(other, with, 0, 3);
      for (const auto& [reference, own] :
           {std::pair<AdamW*, std::vector<Tensor>>{&one, without}, {&other, with}}) {
        train(*reference, own, 3, 4);
      }
      const auto weights = params[2].detach().clone(), small = params[0].detach().clone(),
                 rest = params[1].detach().clone();
      const std::string saved = archived(opt);
      {
        const Disturbed bad({.fail_after = after, .error = EIO});
        new_gradients(params, 2);
        CHECK_THROWS_WITH(opt.step(), Contains("Input/output error"));
      }
      if (zeroed) opt.zero_grad();
      new_gradients(params, 3);
      try {
        opt.step();
      } catch (const c10::Error& refusal) {
        CHECK_THAT(refusal.what(), Contains("Load the weights and the optimizer's state of a checkpoint"));
        CHECK_THROWS_WITH(archived(opt), Contains("save: expected a whole step"));
        load_archive(opt, saved);
        at::NoGradGuard no_grad;
        params[2].copy_(weights);
        params[0].copy_(small);
        params[1].copy_(rest);
        opt.step();
        outcomes.insert("loaded");
      }
      if (equal(params, with)) {
        outcomes.insert("finished");
        check_same(opt, params, other, with);
      } else {
        outcomes.insert("went on");
        check_same(opt, params, one, without);
      }
    }
  }
  CHECK(outcomes == std::set<std::string>{"finished", "loaded", "went on"});
}

namespace {

struct Failing : torch::autograd::Function<Failing> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    TORCH_CHECK(false, "no gradient");
  }
};

Tensor loss_of(const std::vector<Tensor>& params, int step) {
  at::manual_seed(200 + static_cast<uint64_t>(step));
  Tensor loss = at::zeros({});
  for (const Tensor& p : params) loss = loss + (p * at::randn(p.sizes())).sum();
  return loss;
}

}  // namespace

TEST_CASE("after a backward that failed another one goes on, or says what to load", "[offload]") {
  const Folder folder;
  for (const std::string place :
       {std::string(), std::string("cpu"), std::string("stream"), "nvme:" + folder.path}) {
    for (const bool in_backward : {false, true}) {
      for (const bool in_sums : {false, true}) {
        CAPTURE(place, in_backward, in_sums);
        const auto params = parameters(), expected = parameters();
        AdamW opt(groups_of(params)), plain(groups_of(expected));
        if (!place.empty()) opt.set_offload(place);
        opt.set_step_in_backward(in_backward);
        const auto step = [](AdamW& own, const std::vector<Tensor>& of, int number) {
          {
            const auto sums = own.accumulate();
            loss_of(of, 10 * number).backward();
          }
          loss_of(of, number).backward();
          own.step();
          own.zero_grad();
        };
        step(opt, params, 0);
        step(plain, expected, 0);
        std::vector<Tensor> weights;
        for (const Tensor& p : params) weights.push_back(p.detach().clone());
        const std::string saved = archived(opt);
        {
          const auto sums = in_sums ? opt.accumulate() : nullptr;
          // The backward of the autograd function Failing runs last, because its forward ran first.
          const Tensor head = Failing::apply(params[0].clone()).sum();
          CHECK_THROWS_WITH((head + loss_of(params, 1)).backward(), Contains("no gradient"));
        }
        opt.zero_grad();
        try {
          step(opt, params, 2);
        } catch (const c10::Error& refusal) {
          CHECK((in_backward && !in_sums));
          CHECK_THAT(refusal.what(), Contains("Load the weights and the optimizer's state of a checkpoint"));
          opt.zero_grad();
          {
            at::NoGradGuard no_grad;
            for (size_t i = 0; i < params.size(); ++i) params[i].copy_(weights[i]);
          }
          load_archive(opt, saved);
          step(opt, params, 2);
        }
        step(plain, expected, 2);
        check_same(plain, expected, opt, params);
        for (const auto* all : {&params, &expected}) {
          for (const Tensor& p : *all) torch::autograd::impl::set_post_acc_grad_hooks(p, nullptr);
        }
      }
    }
  }
}

TEST_CASE("a forked child drops an optimizer whose state is offloaded, and cannot step it", "[offload]") {
  const Folder folder;
  for (const std::string place : {std::string("cpu"), std::string("stream"), "nvme:" + folder.path}) {
    CAPTURE(place);
    const auto params = parameters(), expected = parameters();
    auto opt = std::make_unique<AdamW>(params);
    AdamW plain(expected);
    opt->set_offload(place);
    opt->set_step_in_backward(true);
    const Disturbed slow({.max_delay_us = 2000});
    for (int i = 0; i < 4; ++i) {
      loss_of(params, i).backward();
      // the process forks while transfers of the optimizer state are in progress
      const int status = in_child([&] {
        int refused = 0;
        try {
          opt->step();
        } catch (const c10::Error& error) {
          refused += std::string(error.what()).find("offload: expected process") != std::string::npos;
        }
        opt.reset();
        return refused == 1 ? 0 : 2;
      });
      CHECK(status == 0);
      opt->step();
      loss_of(expected, i).backward();
      plain.step();
      plain.zero_grad();
    }
    check_same(plain, expected, *opt, params);
    for (const Tensor& p : params) torch::autograd::impl::set_post_acc_grad_hooks(p, nullptr);
  }
}

TEST_CASE("room is made when a place is set, and for each new group", "[offload]") {
  const Folder folder;
  if (::mount("shoestring", folder.path.c_str(), "tmpfs", 0, "size=4m") != 0) {
    WARN("not checked: this user may not mount a file system of 4 MiB");
    return;
  }
  {
    const auto huge = at::randn({600000}).requires_grad_(), small = at::randn({3000}).requires_grad_();
    const std::string message = "AdamW: offload: " + folder.path + ": expected room for ";
    AdamW opt(std::vector<Tensor>{huge}, AdamWOptions(1e-2).state_format("fp32"));
    CHECK_THROWS_WITH(opt.set_offload("nvme:" + folder.path),
                      Contains(message) && Contains("received 4194304 free"));
    new_gradients({huge}, 0);
    opt.step();
    AdamW other(std::vector<Tensor>{small}, AdamWOptions(1e-2).state_format("fp32"));
    other.set_offload("nvme:" + folder.path);
    CHECK_THROWS_WITH(other.add_param_group(torch::optim::OptimizerParamGroup({huge})), Contains(message));
    CHECK(other.param_groups().size() == 1);
    new_gradients({small}, 0);
    other.step();
  }
  ::umount(folder.path.c_str());
}

TEST_CASE("a place that is none is refused, and nothing changes", "[offload]") {
  const Folder folder;
  const auto params = parameters();
  Lion opt(params);
  train(opt, params, 0, 1);
  CHECK_THROWS_WITH(
      opt.set_offload("disk"),
      Contains("Lion: offload: expected None, \"cpu\", \"stream\" or \"nvme:DIR\", received \"disk\""));
  CHECK_THROWS_WITH(opt.set_offload("nvme:" + folder / "none"), Contains("No such file"));
  train(opt, params, 1, 2);
  CHECK(state_of(opt, params[1])["step"].item<float>() == 2);
}

TEST_CASE("chunks of state are what was put, in any order", "[offload]") {
  const Folder folder;
  const auto seed = std::random_device()();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const std::vector<int64_t> blocks{3, 5000, 0, 700, 1, 9000, 0};
  for (const std::string place : {std::string("stream"), "nvme:" + folder.path}) {
    for (const bool splits : {false, true}) {
      CAPTURE(place, splits);
      const auto offload = c10::make_intrusive<Offload>("test", place, c10::Device(c10::kCPU));
      // A block consists of 2 KiB of state and a scale, so a chunk holds 4096 blocks.
      State state(offload, {at::kFloat, at::kFloat}, {512, 1}, blocks, splits);
      const auto all = state.chunks(0, std::ssize(blocks));
      CHECK(all.size() == 4);
      int64_t covered = 0;
      std::vector<bool> counted(blocks.size());
      for (const int64_t chunk : all) {
        const auto piece = state.piece(chunk, 0, std::ssize(blocks));
        covered += piece.blocks;
        for (int64_t i = piece.first; i < piece.last; ++i) counted[static_cast<size_t>(i)] = true;
      }
      CHECK(covered == 3 + 5000 + 700 + 1 + 9000);
      CHECK(std::all_of(counted.begin(), counted.end(), [](bool b) { return b; }));
      for (const Tensor& part : state.values()) CHECK(part.count_nonzero().item<int64_t>() == 0);

      std::vector<float> expected(all.size());
      const Disturbed slow({.max_delay_us = 200});
      for (int step = 0; step < 5; ++step) {
        auto order = all;
        std::shuffle(order.begin(), order.end(), random);
        // `plan` is the order in which chunks are read ahead. In odd steps, take() is called in another
        // order.
        const auto plan = step % 2 == 0 ? order : all;
        // In even steps, the loop below takes and updates the first two chunks again after the last chunk.
        if (step % 2 == 0) order.insert(order.end(), order.begin(), order.begin() + 2);
        state.start(plan);
        for (const int64_t chunk : order) {
          const auto parts = state.take(chunk);
          float& value = expected[static_cast<size_t>(chunk)];
          for (const Tensor& part : parts) {
            REQUIRE(part[0].item<float>() == value);
            REQUIRE(part[-1].item<float>() == value);
            part.add_(1);
          }
          value += 1;
          state.put(chunk);
          CHECK(state.done(chunk));
        }
        state.finish();
        state.commit();
        for (const int64_t chunk : all) {
          const auto piece = state.piece(chunk, 0, std::ssize(blocks));
          const int64_t begin = state.begins()[static_cast<size_t>(piece.first)] + piece.first_block;
          for (size_t i : {0, 1}) {
            const int64_t n = i == 0 ? 512 : 1;
            const Tensor part = state.values()[i].narrow(0, begin * n, piece.blocks * n);
            REQUIRE((part == expected[static_cast<size_t>(chunk)]).all().item<bool>());
          }
        }
      }
    }
  }
}
