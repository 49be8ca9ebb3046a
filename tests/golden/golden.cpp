#include "tests/golden/golden.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>

#include "catch.h"

namespace gpupool::golden {
namespace {

constexpr size_t kPerLine = 16;

std::string readFile(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void readLine(const std::string& line, std::vector<std::byte>& bytes) {
  const size_t colon = line.find(':');
  if (colon == std::string::npos) throw std::runtime_error("no offset: " + line);
  size_t at = std::stoul(line.substr(0, colon), nullptr, 16);
  std::istringstream words(line.substr(colon + 1));
  for (std::string word; words >> word; ++at)
    bytes.at(at) = static_cast<std::byte>(std::stoul(word, nullptr, 16));
}

}  // namespace

std::string toText(const std::string& what, std::span<const std::byte> bytes) {
  std::string text = "# " + what + "\nsize " + std::to_string(bytes.size()) + "\n";
  char word[32];
  for (size_t at = 0; at < bytes.size(); at += kPerLine) {
    const auto line = bytes.subspan(at, std::min(kPerLine, bytes.size() - at));
    if (std::all_of(line.begin(), line.end(), [](std::byte b) { return b == std::byte{0}; })) continue;
    std::snprintf(word, sizeof word, "%04zx:", at);
    text += word;
    for (std::byte b : line) {
      std::snprintf(word, sizeof word, " %02x", std::to_integer<unsigned>(b));
      text += word;
    }
    text += '\n';
  }
  return text;
}

std::vector<std::byte> fromText(const std::string& text) {
  std::vector<std::byte> bytes;
  bool sized = false;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    if (line.starts_with("size ")) {
      bytes.resize(std::stoul(line.substr(5)));
      sized = true;
    } else {
      readLine(line, bytes);
    }
  }
  if (!sized) throw std::runtime_error("no size: not a golden file");
  return bytes;
}

std::vector<std::byte> pinned(const std::string& name, const std::string& what,
                              std::span<const std::byte> bytes) {
  const std::string path = std::string(GOLDEN_FOLDER) + "/" + name + ".txt";
  if (const char* update = std::getenv("GPUPOOL_UPDATE_GOLDEN"); update != nullptr && *update == '1')
    std::ofstream(path) << toText(what, bytes);
  const std::string text = readFile(path);
  INFO(path << " pins what is on the wire. If it must change, so must schema::kProtocolVersion");
  CHECK(text == toText(what, bytes));
  return fromText(text);
}

}  // namespace gpupool::golden
