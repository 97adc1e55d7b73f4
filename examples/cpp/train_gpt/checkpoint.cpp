#include "checkpoint.h"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "input_error.h"

// std::filesystem is not used: LibTorch exports the std::filesystem functions of an older standard library,
// and a program that calls these functions crashes.

namespace {

constexpr size_t kKept = 2;
const std::string kPrefix = "checkpoint-", kSuffix = ".safetensors";

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

}  // namespace

bool has_checkpoint(const std::string& folder) { return !checkpoints(folder).empty(); }

void remove_unfinished(const std::string& folder) {
  for (const std::string& name : names_in(folder)) {
    const bool ours =
        name.rfind(kPrefix, 0) == 0 || name.rfind("model.safetensors", 0) == 0 || name == "config.json.tmp";
    if (ours && name.find(".tmp") != std::string::npos) ::unlink((folder + "/" + name).c_str());
  }
}

void save_checkpoint(const std::string& folder, const shoestring::TrainingRun& run) {
  shoestring::save_training(path_of(folder, run.step), run);
  // If the folder has checkpoints of later steps, they were found damaged when this run was resumed from an
  // older checkpoint. Remove them as well. Several processes that share a run remove the same files.
  size_t kept = 0;
  for (int64_t other : checkpoints(folder)) {
    if (other > run.step || ++kept > kKept) ::unlink(path_of(folder, other).c_str());
  }
}

void load_checkpoint(const std::string& folder, shoestring::TrainingRun& run) {
  std::string refused;
  for (int64_t step : checkpoints(folder)) {
    try {
      shoestring::load_training(path_of(folder, step), run);
      if (!refused.empty())
        std::fprintf(stderr, "train_gpt: passed over a damaged checkpoint: %s\n", refused.c_str());
      return;
    } catch (const c10::Error& error) {
      // If the file is damaged, an older checkpoint may still be valid.
      if (refused.empty()) refused = error.what_without_backtrace();
    }
  }
  throw InputError("--resume " + folder + ": " +
                   (refused.empty() ? "there is no checkpoint to continue from" : refused));
}

void save_model(const std::string& folder, const shoestring::TensorDict& tensors, const std::string& config) {
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
  shoestring::save_safetensors(folder + "/model.safetensors", tensors, {{"format", "pt"}});
}
