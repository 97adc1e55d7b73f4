// Registers the reader and the writer of safetensors files for Python.
#include <ATen/Functions.h>
#include <shoestring/safetensors.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "files/atomic_file.h"
#include "files/content_checksum.h"

namespace shoestring::files {
namespace {

using Texts = c10::Dict<std::string, std::string>;

// SafetensorsFile as a class of TorchBind.
struct BoundFile : torch::CustomClassHolder {
  explicit BoundFile(const std::string& path) : file(path) {}

  // Returns for each tensor of the file, in the order of the data, a meta tensor of its shape and dtype.
  c10::Dict<std::string, at::Tensor> tensors() const {
    c10::Dict<std::string, at::Tensor> found;
    for (const auto& entry : file.entries())
      found.insert(entry.name, at::empty(entry.shape, at::device(at::kMeta).dtype(entry.dtype)));
    return found;
  }
  Texts metadata() const {
    Texts found;
    for (const auto& [key, value] : file.metadata()) found.insert(key, value);
    return found;
  }
  at::Tensor load(const std::string& name) const { return file.load(name); }
  std::string checksum() const { return content_checksum(file); }
  void load_into(const std::string& name, const at::Tensor& out) const { file.load_into(name, out); }

  SafetensorsFile file;
};

Metadata metadata_of(const Texts& texts) {
  Metadata metadata;
  for (const auto& item : texts) metadata.emplace(item.key(), item.value());
  return metadata;
}

// Returns errno, for which Python raises OSError.
int64_t save_for_python(const std::string& path, const std::vector<std::string>& names,
                        const std::vector<at::Tensor>& tensors, const Texts& metadata) {
  TensorDict named;
  for (size_t i = 0; i < names.size(); ++i) named.insert(names[i], tensors.at(i));
  try {
    save_safetensors(path, named, metadata_of(metadata));
  } catch (const FileError& error) {
    return error.code;
  }
  return 0;
}

std::string checksum_for_python(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
                                const Texts& metadata) {
  std::map<std::string, at::Tensor> named;
  for (size_t i = 0; i < names.size(); ++i) named.emplace(names[i], tensors.at(i));
  return content_checksum(metadata_of(metadata), names,
                          [&](const std::string& name) { return named.at(name); });
}

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) {
  m.impl("_content_checksum", checksum_for_python);
  m.impl("_save_safetensors", save_for_python);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<BoundFile>("SafetensorsFile")
      .def(torch::init<std::string>())
      .def("tensors", &BoundFile::tensors)
      .def("metadata", &BoundFile::metadata)
      .def("load", &BoundFile::load)
      .def("checksum", &BoundFile::checksum)
      .def("load_into", &BoundFile::load_into);
}

}  // namespace shoestring::files
