// Finds a kernel's name, its source file and its __shared__ variables in the symbol table of the library that
// contains the kernel. A __shared__ variable is a thread-local variable whose symbol begins with the symbol
// of its function.

#include <cxxabi.h>
#include <elf.h>
#include <link.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "internal.h"

namespace simt {
namespace {

// The library or program that contains the emulator and the kernels.
struct Binary {
  uintptr_t base = 0;
  std::string path;
};

Binary own_binary() {
  Binary own;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        const auto inside = reinterpret_cast<uintptr_t>(&own_binary);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto& header = info->dlpi_phdr[i];
          const uintptr_t begin = info->dlpi_addr + header.p_vaddr;
          if (header.p_type != PT_LOAD || inside < begin || inside >= begin + header.p_memsz) continue;
          const bool is_program = info->dlpi_name == nullptr || *info->dlpi_name == '\0';
          *static_cast<Binary*>(data) = {info->dlpi_addr, is_program ? "/proc/self/exe" : info->dlpi_name};
          return 1;
        }
        return 0;
      },
      &own);
  return own;
}

struct Symbol {
  std::string name;
  int file;  // several files may have local symbols of the same name
  size_t size;
};

struct Table {
  std::vector<std::string> files{""};
  std::map<uintptr_t, Symbol> functions;  // functions by address
  std::vector<Symbol> shared;
};

Table read_table() {
  Table table;
  const Binary own = own_binary();
  std::ifstream in(own.path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  const auto at = [&]<class T>(T& to, size_t offset) {
    std::memset(&to, 0, sizeof to);
    if (offset + sizeof to <= bytes.size()) std::memcpy(&to, bytes.data() + offset, sizeof to);
  };
  Elf64_Ehdr header;
  at(header, 0);
  for (int i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section, strings;
    at(section, header.e_shoff + i * sizeof section);
    if (section.sh_type != SHT_SYMTAB) continue;
    at(strings, header.e_shoff + section.sh_link * sizeof strings);
    for (size_t offset = 0; offset + sizeof(Elf64_Sym) <= section.sh_size; offset += sizeof(Elf64_Sym)) {
      Elf64_Sym symbol;
      at(symbol, section.sh_offset + offset);
      const size_t text = strings.sh_offset + symbol.st_name;
      if (text >= bytes.size()) continue;
      const std::string name = bytes.c_str() + text;
      const int file = static_cast<int>(table.files.size()) - 1, type = ELF64_ST_TYPE(symbol.st_info);
      if (type == STT_FILE) table.files.push_back(name);
      if (type == STT_FUNC) table.functions[own.base + symbol.st_value] = {name, file, symbol.st_size};
      if (type == STT_TLS) table.shared.push_back({name, file, symbol.st_size});
    }
  }
  return table;
}

// Returns "forward<float, 64>" for "void a::b::forward<float, 64>(C)".
std::string short_name(const std::string& symbol) {
  int status = 0;
  char* text = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
  if (text == nullptr) return symbol;
  std::string name = text;
  std::free(text);
  for (const char* space : {"(anonymous namespace)::", "shoestring::cuda::", "shoestring::kernels::"}) {
    for (size_t at; (at = name.find(space)) != std::string::npos;) name.erase(at, std::strlen(space));
  }
  if (name.rfind("void ", 0) == 0) name.erase(0, 5);
  // The first parenthesis outside of the template arguments begins the parameters.
  int depth = 0;
  for (size_t i = 0; i < name.size(); ++i) {
    depth += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
    if (name[i] == '(' && depth == 0) return name.substr(0, i);
  }
  return name;
}

}  // namespace

const Kernel& kernel_at(const void* function) {
  static const Table table = read_table();
  static std::map<const void*, Kernel> known;
  if (const auto found = known.find(function); found != known.end()) return found->second;
  Kernel kernel{"a kernel without a symbol", "", 0};
  const auto symbol = table.functions.find(reinterpret_cast<uintptr_t>(function));
  if (symbol != table.functions.end()) {
    const auto& [name, file, size] = symbol->second;
    kernel.name = short_name(name);
    kernel.file = table.files[file];
    const std::string prefix = "_ZZ" + name.substr(std::min<size_t>(2, name.size())) + "E";
    for (const Symbol& s : table.shared) {
      if (s.file == file && s.name.rfind(prefix, 0) == 0) kernel.shared_bytes += static_cast<int>(s.size);
    }
  }
  return known.emplace(function, kernel).first->second;
}

}  // namespace simt
