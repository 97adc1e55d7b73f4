// Format of the safetensors file of a training run. The tensors are called:
// - "model.<name>";
// - "optimizer.<number>.<name>", with the names of optim/core/stored.h;
// - "part.<name of the part>.<name>";
// - "random.cpu", "random.<type>.<index>" of each accelerator: states of generators. Python adds
// "random.python" and
//   "random.numpy.<name>", which C++ does not read.
// The metadata has the keys:
// - format, "shoestring.training", and format_version;
// - step: a number; position and facts: JSON objects;
// - optimizers: JSON, a list of the metadata of each optimizer;
// - parts: JSON, an object with the names of the parts. In Python, the value of a part holds the entries of
// its state
//   that are no tensors, and the key kinds says what its tensors are in Python, if they are no tensors there;
// - checksum: of the whole content.

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <shoestring/runs/training.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <nlohmann/json.hpp>

#include "files/content_checksum.h"
#include "files/read_file.h"
#include "files/safetensors_writer.h"
#include "optim/core/host_copy.h"
#include "optim/core/split_state.h"
#include "optim/core/stored.h"
#include "runs/generators.h"
#include "runs/parameter_names.h"

namespace shoestring {
namespace {

using Json = nlohmann::json;
using at::Tensor;
using optim::detail::Stored;
using runs::each_generator;

constexpr const char* kFormat = "shoestring.training";
constexpr const char* kVersion = "1";
// Python writes version 2, which has values of parts with their types and, under the key "kinds", those of
// the tensors of parts. Parts that have tensors alone are the same in both.
constexpr const char* kPythonVersion = "2";

// Returns a parameter as a tensor of a run, of which this process has a part if the parameter has no memory.
Stored stored_param(const std::string& name, const Tensor& param) {
  Stored stored;
  const Tensor part = optim::part_of(param);
  stored.tensors.insert(name, part.defined() ? part : param);
  if (!part.defined()) return stored;
  const optim::SplitParameter& split = *optim::split_of(part);
  stored.splits.emplace(name, optim::SplitTensor{split, split.begins, split.sizes});
  return stored;
}

// Returns the tensors whose names begin with `prefix`, by the rest of their names.
TensorDict load_all(const SafetensorsFile& file, const std::string& prefix) {
  TensorDict tensors;
  for (const auto& entry : file.entries()) {
    if (entry.name.rfind(prefix, 0) == 0)
      tensors.insert(entry.name.substr(prefix.size()), file.load(entry.name));
  }
  return tensors;
}

// A file of a run, whose metadata has been checked.
class RunFile {
 public:
  explicit RunFile(const std::string& path) : file(path) {
    const std::string version = text("format_version");
    expect(text("format") == kFormat && (version == kVersion || version == kPythonVersion),
           c10::str("a file of save_training, format_version ", kVersion, " or ", kPythonVersion),
           "another file");
    const std::string sum = files::content_checksum(file);
    expect(text(files::kChecksum) == sum, "the checksum " + text(files::kChecksum),
           sum + ": the file is damaged");
  }

  void expect(bool good, const std::string& expected, const std::string& received) const {
    TORCH_CHECK_VALUE(good, "load_training: ", file.path(), ": expected ", expected, ", received ", received);
  }
  std::string text(const std::string& key) const {
    const auto found = file.metadata().find(key);
    return found == file.metadata().end() ? "" : found->second;
  }
  Json json(const std::string& key) const {
    return files::parse_json("load_training: " + file.path() + ": " + key, text(key));
  }
  // Reads a JSON object into a map.
  template <class Value>
  std::map<std::string, Value> map(const std::string& key) const {
    try {
      return json(key).get<std::map<std::string, Value>>();
    } catch (const Json::exception& error) {
      expect(false, "a JSON object called " + key, error.what());
      return {};
    }
  }

  const SafetensorsFile file;
};

// Raises if the tensors of two parts could have one name.
void check_names(const std::string& what, const TrainingRun& run) {
  for (const auto& [name, part] : run.parts) {
    for (const auto& [other_name, another] : run.parts) {
      TORCH_CHECK_VALUE(other_name.rfind(name + ".", 0) != 0, what,
                        ": parts: expected names of which none begins another, received ", name, " and ",
                        other_name, ". Rename one");
    }
  }
}

void check_facts(const RunFile& saved, const TrainingRun& run) {
  const auto before = saved.map<std::string>("facts");
  for (const auto& [name, now] : run.facts) {
    const auto found = before.find(name);
    saved.expect(found != before.end() && found->second == now, name + " " + now,
                 found == before.end() ? "none" : found->second + ": the file belongs to another run");
  }
}

void check_tensors(const RunFile& saved, const TrainingRun& run) {
  for (const auto& item : run.tensors) {
    const std::string name = "model." + item.key();
    saved.expect(saved.file.contains(name), "the tensor " + name, "a file of another model");
    const auto& entry = saved.file.entry(name);
    const Tensor& value = item.value();
    const bool is_here = !optim::part_of(value).defined();
    saved.expect(!is_here || at::has_internal_overlap(value) != at::MemOverlap::Yes,
                 item.key() + " with memory for each element", "an expanded tensor");
    if (is_here) value.const_data_ptr();  // raises for a weight that is away
    saved.expect(value.sizes() == entry.shape && value.scalar_type() == entry.dtype,
                 c10::str(name, " of shape ", value.sizes(), " and ", value.scalar_type()),
                 c10::str(at::IntArrayRef(entry.shape), " and ", entry.dtype));
  }
  for (const auto& entry : saved.file.entries()) {
    if (entry.name.rfind("model.", 0) != 0) continue;
    saved.expect(run.tensors.contains(entry.name.substr(6)), "the tensors of this model",
                 entry.name + ", which is not among them");
  }
}

void check_parts(const RunFile& saved, const TrainingRun& run) {
  const Json parts = saved.json("parts");
  saved.expect(parts.is_object(), "a JSON object called parts", "another value");
  for (const auto& [name, part] : run.parts) saved.expect(parts.contains(name), "the part " + name, "none");
  for (const auto& [name, values] : parts.items()) {
    saved.expect(run.parts.count(name) > 0, "the parts of this run", name + ", which is not among them");
    saved.expect(values.empty(), "tensors in the part " + name, "values that Python alone reads");
  }
}

std::vector<Stored> read_optimizers(const RunFile& saved, const TrainingRun& run) {
  const Json descriptions = saved.json("optimizers");
  saved.expect(descriptions.is_array() && descriptions.size() == run.optimizers.size(),
               c10::str(run.optimizers.size(), " optimizers"), std::to_string(descriptions.size()));
  std::vector<Stored> all;
  for (size_t i = 0; i < run.optimizers.size(); ++i) {
    Stored& stored = all.emplace_back();
    try {
      stored.metadata = descriptions.at(i).get<Metadata>();
    } catch (const Json::exception& error) {
      saved.expect(false, "texts that describe an optimizer", error.what());
    }
    const std::string prefix = c10::str("optimizer.", i, ".");
    const bool maps = optim::detail::is_split(*run.optimizers[i]);  // then this process reads its parts alone
    for (const auto& entry : saved.file.entries()) {
      if (entry.name.rfind(prefix, 0) != 0) continue;
      stored.tensors.insert(entry.name.substr(prefix.size()),
                            maps ? saved.file.map(entry.name) : saved.file.load(entry.name));
    }
    runs::match_names(stored, *run.optimizers[i], run,
                      c10::str("load_training: ", saved.file.path(), ": optimizer ", i));
  }
  return all;
}

// Undoes what has been done, in reverse order.
class Undo {
 public:
  void add(std::string what, std::function<void()> step) {
    steps_.emplace_back(std::move(what), std::move(step));
  }
  // Calls every step, also after one has thrown. Returns what has thrown; empty if nothing has.
  std::string run() {
    std::string refused;
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) {
      try {
        step->second();
      } catch (const std::exception& error) {
        refused += c10::str(refused.empty() ? "" : " and ", step->first, " (", message_of(error), ")");
      }
    }
    return refused;
  }
  static std::string message_of(const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
  }

 private:
  std::vector<std::pair<std::string, std::function<void()>>> steps_;
};

// Loads the state of everything but the weights. `undo` gets a step for each object before the object
// changes.
void load_states(const RunFile& saved, TrainingRun& run, const std::vector<Stored>& optimizers, Undo& undo) {
  const std::string where = "load_training: " + saved.file.path();
  for (size_t i = 0; i < optimizers.size(); ++i) {
    torch::optim::Optimizer* optimizer = run.optimizers[i];
    auto before = std::make_shared<optim::detail::HostCopy>(std::vector<Tensor>(), std::vector{optimizer});
    undo.add(c10::str("optimizer ", i), [before] { before->restore("load_training"); });
    optim::detail::restore(*optimizer, optimizers[i], where);
  }
  for (auto& [name, part] : run.parts) {
    TensorDict before;  // a copy, since the result of part.state() may share its memory
    for (const auto& item : part.state()) before.insert(item.key(), item.value().clone());
    undo.add("the part " + name, [&part = part, before] { part.load_state(before); });
    part.load_state(load_all(saved.file, "part." + name + "."));
  }
  each_generator([&](const std::string& name, at::Generator generator) {
    if (!saved.file.contains(name)) return;
    const Tensor state = saved.file.load(name);
    const std::lock_guard lock(generator.mutex());
    undo.add(name, [generator, before = generator.get_state()]() mutable {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(before);
    });
    generator.set_state(state);
  });
}

// Loads the weights. The file has been read and checked as a whole, so these reads succeed unless the disk
// fails.
void load_weights(const RunFile& saved, const TrainingRun& run) {
  for (const auto& item : run.tensors) {
    const std::string name = "model." + item.key();
    if (const Tensor part = optim::part_of(item.value()); part.defined()) {
      const optim::SplitParameter& split = *optim::split_of(part);
      Tensor(part).copy_(saved.file.load_range(name, split.begin(), split.end()));
    } else {
      saved.file.load_into(name, item.value());
    }
  }
}

}  // namespace

TensorDict training_tensors(const torch::nn::Module& module, bool frozen) {
  TensorDict tensors;
  const auto add = [&](const std::string& name, const Tensor& tensor) {
    const auto same = [&](const auto& other) { return other.value().is_same(tensor); };
    if (tensor.defined() && std::none_of(tensors.begin(), tensors.end(), same)) tensors.insert(name, tensor);
  };
  for (const auto& item : module.named_parameters()) {
    if (frozen || item.value().requires_grad()) add(item.key(), item.value());
  }
  for (const auto& item : module.named_buffers()) add(item.key(), item.value());
  return tensors;
}

void save_training(const std::string& path, const TrainingRun& run) {
  const torch::NoGradGuard no_grad;
  check_names("save_training", run);
  TORCH_CHECK_VALUE(run.step >= 0, "save_training: step: expected a number of at least 0, received ",
                    run.step);
  std::vector<files::Source> sources;
  const auto add = [&](const Stored& stored, const std::string& prefix) {
    for (files::Source& source : optim::detail::sources_of(stored, prefix, "save_training", path))
      sources.push_back(std::move(source));
  };
  bool writes = true;
  for (const auto& item : run.tensors) {
    const Stored stored = stored_param(item.key(), item.value());
    for (const auto& [name, split] : stored.splits) writes &= split.of.piece == 0 && !split.of.is_replica;
    add(stored, "model.");
  }
  Json optimizers = Json::array(), parts = Json::object();
  for (size_t i = 0; i < run.optimizers.size(); ++i) {
    Stored stored = optim::detail::store(*run.optimizers[i]);
    runs::add_names(stored, *run.optimizers[i], run);
    add(stored, c10::str("optimizer.", i, "."));
    optimizers.push_back(stored.metadata);
    writes &= optim::detail::writes(*run.optimizers[i]);
  }
  for (const auto& [name, part] : run.parts) {
    if (!writes) break;
    parts[name] = Json::object();
    Stored state;
    state.tensors = part.state();
    add(state, "part." + name + ".");
  }
  each_generator([&](const std::string& name, at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    Stored state;
    state.tensors.insert(name, generator.get_state());
    add(state, "");
  });
  Metadata metadata{{"format", kFormat},
                    {"format_version", kVersion},
                    {"step", std::to_string(run.step)},
                    {"position", Json(run.position).dump()},
                    {"facts", Json(run.facts).dump()},
                    {"optimizers", optimizers.dump()},
                    {"parts", parts.dump()}};
  metadata[files::kChecksum] = files::checksum_of(sources, metadata, writes);
  files::save_gathered("save_training", path, sources, metadata, writes);
}

void load_training(const std::string& path, TrainingRun& run) {
  const torch::NoGradGuard no_grad;
  check_names("load_training", run);
  const RunFile saved(path);
  check_facts(saved, run);
  check_tensors(saved, run);
  check_parts(saved, run);
  const auto position = saved.map<int64_t>("position");
  const Json step = saved.json("step");
  saved.expect(step.is_number_unsigned(), "a number of steps", "another value");
  const std::vector<Stored> optimizers = read_optimizers(saved, run);

  Undo undo;
  try {
    load_states(saved, run, optimizers, undo);
    load_weights(saved, run);
  } catch (const std::exception& error) {
    const std::string refused = undo.run();
    TORCH_CHECK_VALUE(refused.empty(), "load_training: ", path, ": ", Undo::message_of(error),
                      ". Everything is as it was but ", refused,
                      ", which refused the state that it had. Make it anew");
    throw;
  } catch (...) {
    undo.run();
    throw;
  }
  run.step = step.get<int64_t>();
  run.position = position;
}

}  // namespace shoestring
