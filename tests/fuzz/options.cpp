// Options as people write them: YAML files, command lines, sizes and times.
//
// Input: u8: 0 a file, 1 words separated by zeros, else single values; the text.
#include <string>
#include <vector>

#include "base/options.h"
#include "tests/fuzz/input.h"

using namespace gpupool;

namespace {

struct Values {
  std::string text = "x";
  bool flag = false;
  uint32_t count = 1;
  std::chrono::milliseconds time{1};
  options::Bytes bytes{1};
  std::vector<options::Option> table() {
    return {{"text", text, "TEXT", "a text"},
            {"flag", flag, "", "a switch"},
            {"count", count, "N", "a number"},
            {"time", time, "TIME", "a time"},
            {"bytes", bytes, "SIZE", "a size"}};
  }
};

template <class Read>
void attempt(Read read) {
  try {
    read();
  } catch (const options::OptionError&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input input(data, size);
  const auto kind = input.value<uint8_t>();
  auto all = input.all();
  const std::string text(reinterpret_cast<const char*>(all.data()), all.size());
  Values values;
  options::Set set(values.table(), "FUZZ_");
  if (kind == 0) {
    attempt([&] { set.readYaml(text, "input"); });
  } else if (kind == 1) {
    std::vector<std::string> words;
    for (size_t at = 0; at < text.size() && words.size() < 64;) {
      const size_t end = std::min(text.find('\0', at), text.size());
      words.push_back(text.substr(at, end - at));
      at = end + 1;
    }
    attempt([&] { set.readArguments(words); });
  } else {
    attempt([&] { options::formatTime(options::parseTime(text)); });
    attempt([&] {
      const auto bytes = options::parseBytes(text);
      if (options::parseBytes(options::formatBytes(bytes)) != bytes) __builtin_trap();
    });
    attempt([&] { options::parseCount(text); });
    attempt([&] { options::parseBool(text); });
  }
  return 0;
}
