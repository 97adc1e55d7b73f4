// Format of the safetensors file of a training run. The tensors are called:
// - "model.<name>";
// - "optimizer.<number>.<name>", with the names of optim/stored.h;
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
//   that are no tensors;
// - checksum: of the whole content.

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <shoestring/training.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <nlohmann/json.hpp>

#include "files/content_checksum.h"
#include "files/read_file.h"
#include "files/safetensors_writer.h"
#include "optim/split_state.h"
#include "optim/stored.h"
#include "runs/generators.h"

namespace shoestring {
namespace {

using Json = nlohmann::json;
using at::Tensor;
using optim::detail::Stored;
using runs::each_generator;

constexpr const char* kFormat = "shoestring.training";
constexpr const char* kVersion = "1";

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
    expect(text("format") == kFormat && text("format_version") == kVersion,
           c10::str("a file of save_training, format_version ", kVersion), "another file");
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
    const Tensor& own = item.value();
    saved.expect(own.sizes() == entry.shape && own.scalar_type() == entry.dtype,
                 c10::str(name, " of shape ", own.sizes(), " and ", own.scalar_type()),
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
  }
  return all;
}

// Undoes what has been done, in reverse order, unless commit() has been called.
class Undo {
 public:
  ~Undo() {
    for (auto step = steps_.rbegin(); step != steps_.rend(); ++step) (*step)();
  }
  void add(std::function<void()> step) { steps_.push_back(std::move(step)); }
  void commit() { steps_.clear(); }

 private:
  std::vector<std::function<void()>> steps_;
};

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
    const Stored stored = optim::detail::store(*run.optimizers[i]);
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
  const RunFile saved(path);
  check_facts(saved, run);
  check_tensors(saved, run);
  check_parts(saved, run);
  const auto position = saved.map<int64_t>("position");
  const Json step = saved.json("step");
  saved.expect(step.is_number_unsigned(), "a number of steps", "another value");
  const std::vector<Stored> optimizers = read_optimizers(saved, run);

  Undo undo;
  for (size_t i = 0; i < optimizers.size(); ++i) {
    torch::optim::Optimizer* optimizer = run.optimizers[i];
    undo.add([optimizer, before = optim::detail::store(*optimizer)] {
      optim::detail::restore(*optimizer, before, "load_training");
    });
    optim::detail::restore(*optimizer, optimizers[i], "load_training: " + path);
  }
  for (auto& [name, part] : run.parts) {
    undo.add([&part = part, before = part.state()] { part.load_state(before); });
    part.load_state(load_all(saved.file, "part." + name + "."));
  }
  each_generator([&](const std::string& name, at::Generator generator) {
    if (!saved.file.contains(name)) return;
    const Tensor state = saved.file.load(name);
    const std::lock_guard lock(generator.mutex());
    undo.add([generator, before = generator.get_state()]() mutable { generator.set_state(before); });
    generator.set_state(state);
  });
  // The file has been read and checked as a whole, so these reads succeed unless the disk fails.
  for (const auto& item : run.tensors) {
    const std::string name = "model." + item.key();
    if (const Tensor part = optim::part_of(item.value()); part.defined()) {
      const optim::SplitParameter& split = *optim::split_of(part);
      Tensor(part).copy_(saved.file.load_range(name, split.begin(), split.end()));
    } else {
      saved.file.load_into(name, item.value());
    }
  }
  undo.commit();
  run.step = step.get<int64_t>();
  run.position = position;
}

}  // namespace shoestring
