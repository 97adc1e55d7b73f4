#include "files/safetensors_writer.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "files/content_checksum.h"
#include "files/safetensors_format.h"

namespace shoestring::files {
namespace {

size_t dtype_rank(const std::string& caller, const std::string& path, const TensorInfo& tensor) {
  for (size_t i = 0; i < std::size(kDTypes); ++i) {
    if (kDTypes[i].type == tensor.dtype) return i;
  }
  TORCH_CHECK_VALUE(false, caller, ": ", path, ": tensor ", quote(tensor.name),
                    ": safetensors has no dtype for ", tensor.dtype);
}

int64_t bytes_of(const TensorInfo& tensor) {
  auto bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (const int64_t size : tensor.shape) bytes *= size;
  return bytes;
}

std::string header_of(const std::string& caller, const std::string& path,
                      const std::vector<TensorInfo>& tensors, const Metadata& metadata) {
  std::string text;
  try {
    text = metadata.empty() ? "{" : "{\"__metadata__\":" + nlohmann::json(metadata).dump() + ",";
    int64_t end = 0;
    for (const TensorInfo& tensor : tensors) {
      const int64_t begin = end;
      end += bytes_of(tensor);
      const nlohmann::ordered_json entry = {{"dtype", kDTypes[dtype_rank(caller, path, tensor)].name},
                                            {"shape", tensor.shape},
                                            {"data_offsets", {begin, end}}};
      text += nlohmann::json(tensor.name).dump() + ":" + entry.dump() + ",";
    }
  } catch (const nlohmann::json::exception&) {
    TORCH_CHECK_VALUE(false, caller, ": ", path, ": expected names and metadata in UTF-8");
  }
  if (text.size() > 1) text.pop_back();  // removes the comma after the last tensor's entry
  text += "}";
  // pads the header, so that tensor data starts at a multiple of 8 bytes
  text.resize((text.size() + 7) / 8 * 8, ' ');
  TORCH_CHECK_VALUE(text.size() <= static_cast<size_t>(kMaxHeader), caller, ": ", path, ": the header has ",
                    text.size(), " bytes, and the format allows ", kMaxHeader);
  return text;
}

}  // namespace

TensorInfo info_of(const std::string& caller, const std::string& path, const std::string& name,
                   const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided, caller, ": ", path, ": tensor ",
                    quote(name), ": expected a dense tensor, received ",
                    tensor.defined() ? c10::str(tensor.layout()) : "an undefined one");
  return {name, tensor.scalar_type(), tensor.sizes().vec()};
}

std::vector<TensorInfo> sorted(const std::string& caller, const std::string& path,
                               std::vector<TensorInfo> tensors) {
  for (const TensorInfo& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.name != "__metadata__", caller, ": ", path,
                      ": a tensor cannot be called __metadata__");
    dtype_rank(caller, path, tensor);
  }
  std::sort(tensors.begin(), tensors.end(), [&](const TensorInfo& a, const TensorInfo& b) {
    return std::pair(dtype_rank(caller, path, a), std::string_view(a.name)) <
           std::pair(dtype_rank(caller, path, b), std::string_view(b.name));
  });
  return tensors;
}

SafetensorsWriter::SafetensorsWriter(const std::string& caller, const std::string& path,
                                     std::vector<TensorInfo> tensors, const Metadata& metadata)
    : order_(sorted(caller, path, std::move(tensors))), file_(caller, path) {
  const std::string text = header_of(caller, path, order_, metadata);
  const uint64_t length = text.size();
  file_.write(&length, sizeof length);
  file_.write(text.data(), static_cast<int64_t>(text.size()));
}

void SafetensorsWriter::write(const at::Tensor& tensor) {
  const TensorInfo& next = order_.at(written_++);
  TORCH_INTERNAL_ASSERT(tensor.scalar_type() == next.dtype && tensor.sizes() == next.shape);
  const at::Tensor data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  file_.write(data.const_data_ptr(), static_cast<int64_t>(data.nbytes()));
}

void SafetensorsWriter::commit() {
  TORCH_INTERNAL_ASSERT(written_ == order_.size());
  file_.commit();
}

namespace {

// Returns the tensors by name: all that are written, or those of which another process needs a part.
std::map<std::string, const Source*> used(const std::vector<Source>& sources, bool writes) {
  std::map<std::string, const Source*> by_name;
  for (const Source& source : sources) {
    if (writes || source.is_split) by_name[source.info.name] = &source;
  }
  return by_name;
}

}  // namespace

std::string checksum_of(const std::vector<Source>& sources, const Metadata& metadata, bool writes) {
  const auto by_name = used(sources, writes);
  std::vector<std::string> names;
  for (const auto& [name, source] : by_name) names.push_back(name);
  return content_checksum(metadata, std::move(names),
                          [&](const std::string& name) { return by_name.at(name)->whole(); });
}

void save_gathered(const std::string& caller, const std::string& path, const std::vector<Source>& sources,
                   const Metadata& metadata, bool writes) {
  const auto by_name = used(sources, writes);
  std::vector<TensorInfo> infos;
  for (const auto& [name, source] : by_name) infos.push_back(source->info);
  std::exception_ptr error;
  std::optional<SafetensorsWriter> writer;
  const auto guard = [&](const auto& step) {
    if (error || !writes) return;
    try {
      step();
    } catch (...) {
      error = std::current_exception();
    }
  };
  guard([&] { writer.emplace(caller, path, infos, metadata); });
  for (const TensorInfo& info : sorted(caller, path, infos)) {
    const Source& source = *by_name.at(info.name);
    if (error && !source.is_split) continue;
    const at::Tensor tensor = source.whole();
    guard([&] { writer->write(tensor); });
  }
  guard([&] { writer->commit(); });
  if (error) std::rethrow_exception(error);
}

}  // namespace shoestring::files
