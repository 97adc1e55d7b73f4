// Parses the JSON header of a safetensors file with an event-driven (SAX) parser. It never builds a tree,
// because a header of 100 MB that consists of "[[[[" would become a tree of several GB.

#include "files/safetensors_header.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <unordered_set>

#include "files/safetensors_format.h"

namespace shoestring::files {
namespace {

using Entry = SafetensorsFile::Entry;
using Json = nlohmann::json;

template <class... Parts>
[[noreturn]] void fail(const std::string& path, const Parts&... parts) {
  TORCH_CHECK_VALUE(false, "safetensors: ", path, ": ", parts...);
}

class Parser : public nlohmann::json_sax<Json> {
 public:
  Parser(const std::string& path, Header& out) : path_(path), out_(out) {}

  bool start_object(size_t) override {
    if (where_ == Where::kStart) {
      where_ = Where::kFile;
    } else if (where_ == Where::kFile) {
      where_ = name_ == "__metadata__" ? Where::kMetadata : Where::kTensor;
      entry_ = {};
      seen_ = {};
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& key) override {
    if (where_ == Where::kFile) {
      if (!names_.insert(key).second) fail(path_, "header: the name ", quote(key), " appears twice");
      name_ = std::move(key);
    } else if (where_ == Where::kMetadata) {
      if (out_.metadata.count(key)) fail(path_, "__metadata__: the key ", quote(key), " appears twice");
      field_ = std::move(key);
    } else {
      const auto known = std::find(kFields.begin(), kFields.end(), key);
      if (known == kFields.end()) {
        fail_tensor("expected the fields dtype, shape and data_offsets, received ", quote(key));
      }
      bool& seen = seen_[known - kFields.begin()];
      if (seen) fail_tensor("the field ", key, " appears twice");
      seen = true;
      field_ = std::move(key);
    }
    return true;
  }

  bool end_object() override {
    if (where_ == Where::kTensor) {
      for (size_t i = 0; i < kFields.size(); ++i) {
        if (!seen_[i]) fail_tensor("the field ", kFields[i], " is missing");
      }
      entry_.name = name_;
      check_size(entry_);
      out_.entries.push_back(std::move(entry_));
    }
    where_ = where_ == Where::kFile ? Where::kStart : Where::kFile;
    return true;
  }

  bool start_array(size_t) override {
    if (where_ != Where::kTensor || field_ == "dtype") unexpected("a list");
    where_ = Where::kList;
    list_.clear();
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (where_ != Where::kList) unexpected("a number");
    if (value > INT64_MAX) fail_tensor(field_, ": ", value, " is too large");
    if (list_.size() == kMaxDims) fail_tensor(field_, ": more than ", kMaxDims, " numbers");
    list_.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool end_array() override {
    where_ = Where::kTensor;
    if (field_ == "shape") {
      entry_.shape = list_;
      return true;
    }
    if (list_.size() != 2 || list_[0] > list_[1]) {
      fail_tensor("data_offsets: expected [begin, end], received [", c10::Join(", ", list_), "]");
    }
    entry_.begin = list_[0];
    entry_.end = list_[1];
    return true;
  }

  bool string(std::string& value) override {
    if (where_ == Where::kMetadata) {
      out_.metadata.emplace(field_, std::move(value));
    } else if (where_ == Where::kTensor && field_ == "dtype") {
      const auto known =
          std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](auto& d) { return value == d.name; });
      if (known == std::end(kDTypes)) fail_tensor("dtype: PyTorch has no dtype ", quote(value));
      entry_.dtype = known->type;
    } else {
      unexpected("a string");
    }
    return true;
  }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("true or false"); }
  bool number_integer(int64_t value) override { return unexpected(std::to_string(value)); }
  bool number_float(double, const std::string& text) override { return unexpected(quote(text)); }
  bool binary(binary_t&) override { return unexpected("bytes"); }
  bool parse_error(size_t position, const std::string&, const Json::exception&) override {
    fail(path_, "the header is not valid JSON at its byte ", position);
  }

 private:
  enum class Where { kStart, kFile, kMetadata, kTensor, kList };
  static constexpr std::array<const char*, 3> kFields{"dtype", "shape", "data_offsets"};

  template <class... Parts>
  [[noreturn]] void fail_tensor(const Parts&... parts) {
    fail(path_, "tensor ", quote(name_), ": ", parts...);
  }

  bool unexpected(const std::string& received) {
    if (where_ == Where::kStart) fail(path_, "header: expected an object, received ", received);
    if (where_ == Where::kFile) fail_tensor("expected an object, received ", received);
    if (where_ == Where::kMetadata) fail(path_, "__metadata__: expected strings, received ", received);
    fail_tensor(field_, ": unexpected ", received);
  }

  void check_size(const Entry& entry) {
    int64_t bytes = c10::elementSize(entry.dtype);
    bool overflow = false;
    // The overflow check counts a size of 0 as 1, because strides are products of the other sizes and must
    // not overflow either.
    for (int64_t size : entry.shape)
      overflow |= __builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes);
    if (overflow) fail_tensor("shape: [", c10::Join(", ", entry.shape), "] overflows 64 bits");
    if (std::count(entry.shape.begin(), entry.shape.end(), 0)) bytes = 0;
    if (bytes != entry.end - entry.begin) {
      fail_tensor("data_offsets: expected ", bytes, " bytes for shape [", c10::Join(", ", entry.shape),
                  "] of ", c10::toString(entry.dtype), ", received ", entry.end - entry.begin);
    }
  }

  const std::string& path_;
  Header& out_;
  Where where_ = Where::kStart;
  std::string name_, field_;
  Entry entry_;
  std::array<bool, 3> seen_{};
  std::vector<int64_t> list_;
  std::unordered_set<std::string> names_;
};

}  // namespace

Header parse_header(const std::string& path, std::string_view text, int64_t data) {
  Header header;
  Parser parser(path, header);
  Json::sax_parse(text.begin(), text.end(), &parser);

  std::sort(header.entries.begin(), header.entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  int64_t end = 0;
  for (const Entry& entry : header.entries) {
    if (entry.begin != end) {
      fail(path, "tensor ", quote(entry.name), ": expected its bytes to begin at ", end,
           ", where the one before ends, ", "received ", entry.begin,
           entry.begin < end ? ": they overlap" : ": there is a hole");
    }
    end = entry.end;
  }
  if (end != data) {
    fail(path, "the header describes ", end, " bytes of tensors, the file holds ", data,
         end > data ? ": it is truncated" : "");
  }
  return header;
}

}  // namespace shoestring::files
