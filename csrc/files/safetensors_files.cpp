#include "files/safetensors_files.h"

#include <c10/util/Exception.h>
#include <sys/stat.h>
#include <unistd.h>

#include <climits>

#include "files/read_file.h"
#include "files/safetensors_format.h"

namespace shoestring::files {

namespace {

// maximum size of model.safetensors.index.json in bytes; the file has about 100 bytes per tensor
constexpr int64_t kMaxIndex = 16'000'000;

}  // namespace

SafetensorsFiles::SafetensorsFiles(const std::string& path) {
  // Uses stat() because std::filesystem crashes: LibTorch exports an older version of that library.
  struct stat info{};
  const bool folder = ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
  const std::string single = folder ? path + "/model.safetensors" : path, index = single + ".index.json";
  if (!folder || ::access(single.c_str(), F_OK) == 0) {
    open_file(single);
  } else {
    TORCH_CHECK_VALUE(
        ::access(index.c_str(), F_OK) == 0, "safetensors: ", path,
        ": expected model.safetensors or model.safetensors.index.json in this folder, found neither");
    open_shards(path, index);
  }
}

void SafetensorsFiles::open_file(const std::string& path) {
  files_.push_back(std::make_unique<SafetensorsFile>(path));
  for (const auto& entry : files_.back()->entries()) {
    names_.push_back(entry.name);
    where_[entry.name] = files_.back().get();
  }
}

void SafetensorsFiles::open_shards(const std::string& folder, const std::string& index) {
  const auto json = read_json("safetensors", index, kMaxIndex);
  TORCH_CHECK_VALUE(json.is_object() && json.contains("weight_map") && json["weight_map"].is_object(),
                    "safetensors: ", index, ": expected an object with the object weight_map");

  std::map<std::string, const SafetensorsFile*> opened;
  for (const auto& [name, shard] : json["weight_map"].items()) {
    TORCH_CHECK_VALUE(shard.is_string(), "safetensors: ", index, ": tensor ", quote(name),
                      ": expected the name of a file");
    const auto file = shard.get<std::string>();
    // A shard's name must not contain a folder, because it could then refer to any file on the disk.
    TORCH_CHECK_VALUE(!file.empty() && file.size() <= NAME_MAX &&
                          file.find_first_of(std::string("/\\\0", 3)) == std::string::npos,
                      "safetensors: ", index, ": tensor ", quote(name),
                      ": expected a file in the same folder, received ", quote(file));
    auto& open = opened[file];
    if (open == nullptr) {
      files_.push_back(std::make_unique<SafetensorsFile>(folder + "/" + file));
      open = files_.back().get();
    }
    open->entry(name);  // raises an error if the shard lacks the tensor
    where_[name] = open;
  }
  for (const auto& file : files_) {
    for (const auto& entry : file->entries()) {
      const auto found = where_.find(entry.name);
      if (found != where_.end() && found->second == file.get()) names_.push_back(entry.name);
    }
  }
}

}  // namespace shoestring::files
