#include "schema/fault.h"

#include <charconv>
#include <string_view>

namespace gpupool::schema {
namespace {

constexpr std::string_view kMark = "gpupool-fault:";        // kind:code:text
constexpr std::string_view kRemote = "remote exception: ";  // KJ's, of what came over RPC

// Takes "12:" from the front.
bool takeNumber(std::string_view& text, uint32_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end == text.data() + text.size() || *end != ':') return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()) + 1);
  return true;
}

}  // namespace

kj::Exception faultException(FaultKind kind, const std::string& text, uint32_t code) {
  const std::string whole = std::string(kMark) + std::to_string(static_cast<uint32_t>(kind)) + ":" +
                            std::to_string(code) + ":" + text;
  return kj::Exception(kj::Exception::Type::FAILED, "", 0, kj::heapString(whole.c_str()));
}

Fault faultOf(const kj::Exception& error) {
  Fault fault;
  std::string_view text = error.getDescription().cStr();
  if (text.starts_with(kRemote)) {
    fault.remote = true;
    text.remove_prefix(kRemote.size());
  }
  if (std::string_view rest = text; rest.starts_with(kMark)) {
    rest.remove_prefix(kMark.size());
    uint32_t kind = 0, code = 0;
    if (takeNumber(rest, kind) && takeNumber(rest, code) && kind <= static_cast<uint32_t>(FaultKind::open)) {
      fault.kind = static_cast<FaultKind>(kind);
      fault.code = code;
      text = rest;
    }
  }
  fault.text = text;
  return fault;
}

}  // namespace gpupool::schema
