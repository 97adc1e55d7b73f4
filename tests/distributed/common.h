#pragma once

// Helpers that the tests of several processes share.

#include <array>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include <shoestring/distributed/distributed.h>
#include <shoestring/optim.h>

using at::Tensor;
using shoestring::distributed::GroupPtr;

inline int failures = 0;

inline void expect(bool good, const std::string& what) {
  if (good) return;
  ++failures;
  std::cerr << "not so: " << what << "\n";
}

inline const char* text(char** arguments, int number, const char* otherwise) {
  for (int i = 0; i <= number; ++i)
    if (arguments[i] == nullptr) return otherwise;
  return arguments[number];
}

inline int64_t argument(char** arguments, int number, int64_t otherwise) {
  const char* found = text(arguments, number, nullptr);
  return found == nullptr ? otherwise : std::atoll(found);
}

inline GroupPtr connect(int64_t milliseconds = 60000) {
  using shoestring::distributed::ProcessGroupOptions;
  return shoestring::distributed::init_process_group(
      ProcessGroupOptions().timeout(std::chrono::milliseconds(milliseconds)));
}

template <class Optimizer, class Options>
std::unique_ptr<shoestring::optim::LowMemoryOptimizer> made(const std::vector<Tensor>& params,
                                                            char** arguments, Options options) {
  options.state_format(arguments[1]).weight_rounding(arguments[2]);
  auto optimizer = std::make_unique<Optimizer>(params, options);
  optimizer->set_max_grad_norm(0.5);
  return optimizer;
}

inline std::unique_ptr<shoestring::optim::LowMemoryOptimizer> optimizer_of(const std::vector<Tensor>& params,
                                                                           char** arguments) {
  namespace optim = shoestring::optim;
  const std::string name = arguments[0];
  if (name == "sgd") return made<optim::SGD>(params, arguments, optim::SGDOptions(1e-2).momentum(0.9));
  if (name == "lion") return made<optim::Lion>(params, arguments, optim::LionOptions(1e-3));
  if (name == "ademamix") return made<optim::AdEMAMix>(params, arguments, optim::AdEMAMixOptions(1e-2));
  if (name == "muon") return made<optim::Muon>(params, arguments, optim::MuonOptions(1e-2));
  if (name == "came") return made<optim::CAME>(params, arguments, optim::CAMEOptions(1e-2));
  if (name == "lamb") return made<optim::LAMB>(params, arguments, optim::LAMBOptions(1e-2));
  if (name == "adafactor_mean")
    return made<optim::Adafactor>(params, arguments, optim::AdafactorOptions(1e-2).beta1(0.9));
  if (name == "adafactor") return made<optim::Adafactor>(params, arguments, optim::AdafactorOptions(1e-2));
  return made<optim::AdamW>(params, arguments, optim::AdamWOptions(1e-2).min_quantize_size(100));
}

// Runs a function in two threads at once, and says if it throws.
inline void in_two_threads(const std::function<void()>& function) {
  std::array<std::string, 2> errors;
  const auto run = [&](std::string& error) {
    try {
      function();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
  };
  std::thread one(run, std::ref(errors[0])), two(run, std::ref(errors[1]));
  one.join(), two.join();
  for (const std::string& error : errors) expect(error.empty(), error);
}

// The groups of hybrid sharding: ranks that follow each other split the parameters.
struct Groups {
  GroupPtr split, replicas;
};

inline Groups groups_of(const GroupPtr& all, int64_t split) {
  if (split == all->getSize()) return {all, {}};
  Groups own;
  for (int64_t first = 0; first < all->getSize(); first += split) {
    std::vector<int64_t> ranks;
    for (int64_t i = 0; i < split; ++i) ranks.push_back(first + i);
    if (const GroupPtr group = shoestring::distributed::new_group(all, ranks)) own.split = group;
  }
  for (int64_t part = 0; part < split; ++part) {
    std::vector<int64_t> ranks;
    for (int64_t i = part; i < all->getSize(); i += split) ranks.push_back(i);
    if (const GroupPtr group = shoestring::distributed::new_group(all, ranks)) own.replicas = group;
  }
  return own;
}

// Returns the bytes of the storages of an optimizer's state, without the step counters.
inline int64_t state_bytes(const torch::optim::Optimizer& optimizer) {
  std::map<const void*, int64_t> storages;
  for (const auto& [key, state] : optimizer.state()) {
    for (const auto& [name, tensor] : dynamic_cast<const shoestring::optim::ParamState&>(*state).tensors())
      if (tensor.numel() > 0 && name != "step")
        storages[tensor.storage().data()] = static_cast<int64_t>(tensor.storage().nbytes());
  }
  int64_t bytes = 0;
  for (const auto& [address, size] : storages) bytes += size;
  return bytes;
}

// Tests of fully_shard.cpp.
void fully_shard(char** arguments);
void fully_shard_adapters(char** arguments);
void fully_shard_qlora(char** arguments);
void fully_shard_tied(char** arguments);
void fully_shard_files(char** arguments);
void fully_shard_refuses(char** arguments);
void fully_shard_threads(char** arguments);

// A test of compressed.cpp.
void fully_shard_compressed(char** arguments);

// A test of statistics.cpp.
void running_statistics(char** arguments);

// A test of low_rank.cpp.
void fully_shard_low_rank(char** arguments);

// Tests of diloco.cpp.
void diloco(char** arguments);
void diloco_survivors(char** arguments);
void diloco_join(char** arguments);
void diloco_refuses(char** arguments);
void diloco_threads(char** arguments);

// A test of device.cpp.
void other_device(char** arguments);
