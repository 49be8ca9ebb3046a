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

// What the system said, of "::read(fd, buffer, maxBytes): Connection reset by peer; n = 4", as KJ tells a
// call that failed. Other texts are left alone.
std::string withoutCall(const std::string& text) {
  const size_t name = text.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_:");
  const size_t call = text.find("): ");
  if (name == 0 || name == std::string::npos || text[name] != '(' || call == std::string::npos) return text;
  return text.substr(call + 3, text.find("; ", call) - call - 3);
}

void removePrefix(std::string& text, std::string_view prefix) {
  if (text.starts_with(prefix) && text != prefix) text.erase(0, prefix.size());
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

std::string plainText(const kj::Exception& error) {
  std::string text = faultOf(error).text;
  if (text == "Peer disconnected.") return "the connection was closed";
  removePrefix(text, "Peer disconnected.");
  removePrefix(text, "std::exception: ");  // of one that is not KJ's, and has passed through a promise
  if (const std::string_view why = "gai_strerror(status) = "; text.starts_with("DNS lookup failed."))
    if (const size_t at = text.find(why); at != std::string::npos)
      text = "the name was not found: " + text.substr(at + why.size());
  if (text.starts_with("expected "))  // "expected port < 65536 [70000 < 65536]; Port number too large."
    if (const size_t at = text.find("; "); at != std::string::npos) text.erase(0, at + 2);
  if (text == "Premature EOF.") return "the connection was closed";
  return withoutCall(text);
}

}  // namespace gpupool::schema
