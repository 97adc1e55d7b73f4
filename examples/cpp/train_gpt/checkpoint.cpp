#include "checkpoint.h"

#include <ATen/ops/scalar_tensor.h>
#include <dirent.h>
#include <fcntl.h>
#include <shoestring/optim.h>
#include <shoestring/safetensors.h>
#include <torch/optim/adamw.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "input_error.h"

// std::filesystem is not used: LibTorch exports the std::filesystem functions of an older standard library,
// and a program that calls these functions crashes.

namespace {

using at::Tensor;
using shoestring::SafetensorsFile;
using OurState = shoestring::optim::ParamState;
using PlainState = torch::optim::AdamWParamState;

constexpr size_t kKept = 2;
const std::string kPrefix = "checkpoint-", kSuffix = ".safetensors", kChecksum = "checksum";
const std::string kScaler = "scaler.";  // begins the names of the tensors of GradScaler

std::string path_of(const std::string& folder, int64_t step) {
  return folder + "/" + kPrefix + std::to_string(step) + kSuffix;
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(folder.c_str()), ::closedir);
  while (const dirent* entry = dir ? ::readdir(dir.get()) : nullptr) names.emplace_back(entry->d_name);
  return names;
}

// Returns the step numbers of the checkpoints in a folder, newest first. Unfinished checkpoint files have
// other names and are ignored.
std::vector<int64_t> checkpoints(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const std::string& name : names_in(folder)) {
    if (name.size() <= kPrefix.size() + kSuffix.size() || name.rfind(kPrefix, 0) != 0) continue;
    const char* end = name.data() + name.size() - kSuffix.size();
    int64_t step = 0;
    const auto parsed = std::from_chars(name.data() + kPrefix.size(), end, step);
    if (parsed.ec == std::errc() && parsed.ptr == end && end == kSuffix) steps.push_back(step);
  }
  std::sort(steps.rbegin(), steps.rend());
  return steps;
}

// Returns the tensors of a parameter's optimizer state by name, for shoestring's or LibTorch's AdamW.
std::map<std::string, Tensor> named_state(const torch::optim::OptimizerParamState& state) {
  if (const auto* s = dynamic_cast<const OurState*>(&state)) return s->tensors();
  const auto& s = dynamic_cast<const PlainState&>(state);
  return {{"step", at::scalar_tensor(s.step(), at::kLong)},
          {"exp_avg", s.exp_avg()},
          {"exp_avg_sq", s.exp_avg_sq()}};
}

// Returns the tensors whose names begin with `prefix`, by the rest of their names.
std::map<std::string, Tensor> load_all(const SafetensorsFile& file, const std::string& prefix) {
  std::map<std::string, Tensor> tensors;
  for (const auto& entry : file.entries()) {
    if (entry.name.rfind(prefix, 0) == 0) tensors[entry.name.substr(prefix.size())] = file.load(entry.name);
  }
  return tensors;
}

std::unique_ptr<torch::optim::OptimizerParamState> load_state(const SafetensorsFile& file,
                                                              const std::string& prefix, bool ours) {
  auto tensors = load_all(file, prefix);
  if (ours) return std::make_unique<OurState>(std::move(tensors));
  auto state = std::make_unique<PlainState>();
  state->step(tensors.at("step").item<int64_t>());
  state->exp_avg(tensors.at("exp_avg"));
  state->exp_avg_sq(tensors.at("exp_avg_sq"));
  return state;
}

// A 64-bit hash. Each step maps the old hash value to the new one by a bijection, so every single flipped bit
// is detected.
class Hash {
 public:
  void add(const void* data, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    uint64_t word = 0;
    for (; size >= sizeof word; bytes += sizeof word, size -= sizeof word) {
      std::memcpy(&word, bytes, sizeof word);
      mix(word);
    }
    word = 0;
    if (size > 0) std::memcpy(&word, bytes, size);
    mix(word);
    mix(size);
  }
  void add(const std::string& text) { add(text.data(), text.size()); }
  uint64_t value() const { return value_; }

 private:
  void mix(uint64_t word) {
    // the prime of the hash FNV-1a; multiplying by an odd number is a bijection
    value_ = (value_ ^ word) * 1099511628211u;
    value_ ^= value_ >> 32;
  }
  uint64_t value_ = 14695981039346656037u;
};

// Computes a checksum over everything in a checkpoint: metadata, names, dtypes, shapes and bytes. Calls
// tensor_of for one tensor at a time, so not all tensors need to be in memory.
std::string checksum(const shoestring::Metadata& metadata, std::vector<std::string> names,
                     const std::function<Tensor(const std::string&)>& tensor_of) {
  Hash hash;
  for (const auto& [name, text] : metadata) {
    if (name != kChecksum) hash.add(name), hash.add(text);
  }
  std::sort(names.begin(), names.end());
  for (const auto& name : names) {
    const Tensor tensor = tensor_of(name);
    hash.add(name);
    hash.add(c10::toString(tensor.scalar_type()));
    hash.add(tensor.sizes().data(), tensor.dim() * sizeof(int64_t));
    const Tensor bytes = tensor.detach().cpu().contiguous();
    hash.add(bytes.const_data_ptr(), bytes.nbytes());
  }
  return std::to_string(hash.value());
}

// Raises c10::Error if a checkpoint file does not have the checksum that was written into it. Files of older
// versions have no checksum and pass.
void require_sound(const SafetensorsFile& file) {
  const auto found = file.metadata().find(kChecksum);
  if (found == file.metadata().end()) return;
  std::vector<std::string> names;
  for (const auto& entry : file.entries()) names.push_back(entry.name);
  const std::string sum = checksum(file.metadata(), names, [&](const auto& name) { return file.load(name); });
  TORCH_CHECK(sum == found->second, file.path(), ": its content does not have the checksum ", found->second);
}

void require_same_run(const SafetensorsFile& file, const std::string& path, const Fingerprint& fingerprint) {
  for (const auto& [name, now] : fingerprint) {
    const auto found = file.metadata().find(name);
    const std::string before = found == file.metadata().end() ? "nothing" : found->second;
    if (before != now) {
      throw InputError("--resume " + path + ": " + name + " differs: the run has " + before +
                       ", this command has " + now + "; give the same value or another --out");
    }
  }
}

}  // namespace

bool has_checkpoint(const std::string& folder) { return !checkpoints(folder).empty(); }

void remove_unfinished(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    const bool ours =
        name.rfind(kPrefix, 0) == 0 || name.rfind("model.safetensors", 0) == 0 || name == "config.json.tmp";
    if (ours && name.find(".tmp") != std::string::npos) ::unlink((folder + "/" + name).c_str());
  }
}

void save_checkpoint(const std::string& folder, int64_t step, const torch::nn::Module& model,
                     const Optimizers& optimizers, const Fingerprint& fingerprint) {
  shoestring::TensorDict tensors;
  for (const auto& item : model.named_parameters()) {
    tensors.insert("model." + item.key(), item.value());
    const auto& state = optimizers.of(item.value()).state();
    const auto found = state.find(item.value().unsafeGetTensorImpl());
    if (found == state.end()) continue;
    for (const auto& [name, tensor] : named_state(*found->second)) {
      tensors.insert("optimizer." + item.key() + "." + name, tensor);
    }
  }
  for (const auto& field : optimizers.scaler().state()) tensors.insert(kScaler + field.key(), field.value());
  auto metadata = fingerprint;
  metadata["step"] = std::to_string(step);
  metadata[kChecksum] = checksum(metadata, tensors.keys(), [&](const auto& name) { return tensors[name]; });
  shoestring::save_safetensors(path_of(folder, step), tensors, metadata);

  // If the folder has checkpoints of later steps, they were found damaged when this run was resumed from an
  // older checkpoint. Remove them as well.
  size_t kept = 0;
  for (int64_t other : checkpoints(folder)) {
    if (other > step || ++kept > kKept) ::unlink(path_of(folder, other).c_str());
  }
}

int64_t load_checkpoint(const std::string& folder, const torch::nn::Module& model, Optimizers& optimizers,
                        const Fingerprint& fingerprint) {
  std::string refused;
  for (int64_t step : checkpoints(folder)) {
    const std::string path = path_of(folder, step);
    std::unique_ptr<SafetensorsFile> file;
    try {
      file = std::make_unique<SafetensorsFile>(path);
      require_sound(*file);
    } catch (const c10::Error& error) {
      // The checkpoint is damaged. An older checkpoint may still be valid.
      if (refused.empty()) refused = error.what_without_backtrace();
      continue;
    }
    require_same_run(*file, path, fingerprint);
    for (const auto& item : model.named_parameters()) {
      file->load_into("model." + item.key(), item.value());
      const std::string prefix = "optimizer." + item.key() + ".";
      // A parameter that has had no gradient yet has no optimizer state.
      if (!file->contains(prefix + "step")) continue;
      torch::optim::Optimizer& optimizer = optimizers.of(item.value());
      const bool ours = dynamic_cast<shoestring::optim::LowMemoryOptimizer*>(&optimizer) != nullptr;
      optimizer.state()[item.value().unsafeGetTensorImpl()] = load_state(*file, prefix, ours);
    }
    shoestring::TensorDict scaler;
    for (const auto& [name, tensor] : load_all(*file, kScaler)) scaler.insert(name, tensor);
    optimizers.scaler().load_state(scaler);
    if (!refused.empty())
      std::fprintf(stderr, "train_gpt: passed over a damaged checkpoint: %s\n", refused.c_str());
    return step;
  }
  throw InputError("--resume " + folder + ": " +
                   (refused.empty() ? "there is no checkpoint to continue from" : refused));
}

void save_model(const std::string& folder, const torch::nn::Module& model, const std::string& config) {
  const std::string path = folder + "/config.json", temporary = path + ".tmp";
  std::FILE* file = std::fopen(temporary.c_str(), "w");
  const bool written =
      file && std::fputs(config.c_str(), file) >= 0 && std::fflush(file) == 0 && ::fsync(::fileno(file)) == 0;
  const int error = errno;
  if (file) std::fclose(file);
  if (!written || std::rename(temporary.c_str(), path.c_str()) != 0) {
    ::unlink(temporary.c_str());
    throw InputError(path + ": cannot write: " + std::strerror(written ? errno : error));
  }
  // Write model.safetensors last, so that a directory with model.safetensors is complete.
  shoestring::save_safetensors(folder + "/model.safetensors", model.named_parameters(), {{"format", "pt"}});
}
