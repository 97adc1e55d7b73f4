// Registers the reader and the writer of safetensors files for Python.
#include <optional>
#include <utility>

#include <ATen/Functions.h>
#include <shoestring/files/safetensors.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "files/atomic_file.h"
#include "files/content_checksum.h"
#include "files/safetensors_writer.h"

namespace shoestring::files {
namespace {

using Texts = c10::Dict<std::string, std::string>;

// SafetensorsFile as a class of TorchBind.
struct BoundFile : torch::CustomClassHolder {
  explicit BoundFile(const std::string& path) : file(path) {}

  // Returns for each tensor of the file, in the order of the data, a meta tensor of its shape and dtype.
  c10::Dict<std::string, at::Tensor> tensors() const {
    c10::Dict<std::string, at::Tensor> meta_tensors;
    for (const auto& entry : file.entries())
      meta_tensors.insert(entry.name, at::empty(entry.shape, at::device(at::kMeta).dtype(entry.dtype)));
    return meta_tensors;
  }
  Texts metadata() const {
    Texts texts;
    for (const auto& [key, value] : file.metadata()) texts.insert(key, value);
    return texts;
  }
  at::Tensor load(const std::string& name) const { return file.load(name); }
  at::Tensor map(const std::string& name) const { return file.map(name); }
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

// ContentChecksum as a class of TorchBind.
struct BoundChecksum : torch::CustomClassHolder {
  explicit BoundChecksum(const Texts& metadata) : sum(metadata_of(metadata)) {}

  void add(const std::string& name, const at::Tensor& tensor) { sum.add(name, tensor); }
  std::string text() const { return sum.text(); }

  ContentChecksum sum;
};

// SafetensorsWriter as a class of TorchBind. Its methods return errno, for which Python raises OSError.
struct BoundWriter : torch::CustomClassHolder {
  // `like` are tensors of the dtypes and shapes, which may be on the meta device.
  int64_t open(const std::string& caller, const std::string& path, const std::vector<std::string>& names,
               const std::vector<at::Tensor>& like, const Texts& metadata) {
    return guarded(
        [&] { writer.emplace(caller, path, infos(caller, path, names, like), metadata_of(metadata)); });
  }
  int64_t write(const at::Tensor& tensor) {
    return guarded([&] { writer->write(tensor); });
  }
  int64_t commit() {
    return guarded([&] { writer->commit(); });
  }
  // Returns the names in the order in which tensors are written.
  static std::vector<std::string> order(const std::string& caller, const std::string& path,
                                        const std::vector<std::string>& names,
                                        const std::vector<at::Tensor>& like) {
    std::vector<std::string> sorted_names;
    for (TensorInfo& info : sorted(caller, path, infos(caller, path, names, like)))
      sorted_names.push_back(std::move(info.name));
    return sorted_names;
  }

 private:
  static std::vector<TensorInfo> infos(const std::string& caller, const std::string& path,
                                       const std::vector<std::string>& names,
                                       const std::vector<at::Tensor>& like) {
    std::vector<TensorInfo> result;
    for (size_t i = 0; i < names.size(); ++i) result.push_back(info_of(caller, path, names[i], like.at(i)));
    return result;
  }
  template <class Step>
  static int64_t guarded(const Step& step) {
    try {
      step();
    } catch (const FileError& error) {
      return error.code;
    }
    return 0;
  }

  std::optional<SafetensorsWriter> writer;
};

TORCH_LIBRARY_IMPL(shoestring, CompositeExplicitAutograd, m) { m.impl("_save_safetensors", save_for_python); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  m.class_<BoundFile>("SafetensorsFile")
      .def(torch::init<std::string>())
      .def("tensors", &BoundFile::tensors)
      .def("metadata", &BoundFile::metadata)
      .def("load", &BoundFile::load)
      .def("map", &BoundFile::map)
      .def("checksum", &BoundFile::checksum)
      .def("load_into", &BoundFile::load_into);
  m.class_<BoundChecksum>("ContentChecksum")
      .def(torch::init<Texts>())
      .def("add", &BoundChecksum::add)
      .def("text", &BoundChecksum::text);
  m.class_<BoundWriter>("SafetensorsWriter")
      .def(torch::init<>())
      .def("open", &BoundWriter::open)
      .def("write", &BoundWriter::write)
      .def("commit", &BoundWriter::commit)
      .def_static("order", &BoundWriter::order);
}

}  // namespace shoestring::files
