// cuGraphDebugDotPrint: the driver prints into a file that has no name.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <string>

#include "server/worker/serve.h"

namespace gpupool::server {
namespace {

using Text = GPUPOOL_ROW(sessionGraphText);

constexpr size_t kMaxText = size_t{1} << 30;

CUresult print(Session& session, CUgraph graph, unsigned flags, std::string& text) {
  int file = ::memfd_create("gpupool-graph", MFD_CLOEXEC);
  if (file < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  CUresult status = session.driver().cuGraphDebugDotPrint(graph, path.c_str(), flags);
  off_t bytes = ::lseek(file, 0, SEEK_END);
  if (status == CUDA_SUCCESS && (bytes < 0 || static_cast<size_t>(bytes) > kMaxText))
    status = CUDA_ERROR_OPERATING_SYSTEM;
  if (status == CUDA_SUCCESS) {
    text.resize(static_cast<size_t>(bytes));
    ssize_t got = ::pread(file, text.data(), text.size(), 0);
    text.resize(got < 0 ? 0 : static_cast<size_t>(got));
  }
  ::close(file);
  return status;
}

// The name of a driver's handle in this session; 0: the number is none that the session has.
uint64_t nameOf(Objects& objects, uint64_t value) {
  auto known = [&](auto handle) { return objects.known(handle); };
  for (uint64_t name : {known(reinterpret_cast<CUgraphNode>(value)), known(reinterpret_cast<CUgraph>(value)),
                        known(reinterpret_cast<CUfunction>(value)), known(reinterpret_cast<CUkernel>(value)),
                        known(reinterpret_cast<CUcontext>(value)), known(reinterpret_cast<CUevent>(value)),
                        known(reinterpret_cast<CUarray>(value))})
    if (name != 0) return name;
  return 0;
}

// The application's handles in place of the driver's: every "0x..." that is one.
std::string renamed(Objects& objects, const std::string& text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    size_t number = std::min(text.find("0x", at), text.size());
    out.append(text, at, number - at);
    at = number;
    if (at == text.size()) break;
    uint64_t value = 0;
    auto [end, error] = std::from_chars(text.data() + at + 2, text.data() + text.size(), value, 16);
    size_t length = error == std::errc() ? static_cast<size_t>(end - text.data()) - at : 2;
    uint64_t name = length > 2 ? nameOf(objects, value) : 0;
    char digits[24];
    if (name != 0) std::snprintf(digits, sizeof digits, "0x%llX", static_cast<unsigned long long>(name));
    out += name != 0 ? std::string(digits) : text.substr(at, length);
    at += length;
  }
  return out;
}

// Stateless: a longer text is printed again for each of its pieces.
void graphText(Session& session, Call& call) {
  Served<Text> served(session, call);
  if (!served.open()) return;
  std::string text;
  CUresult status = print(session, served.get<"graph">().value(), served.get<"flags">().value(), text);
  if (status == CUDA_SUCCESS) text = renamed(session.objects(), text);
  size_t from = std::min<size_t>(served.get<"offset">().value(), text.size());
  auto& piece = served.get<"text">().array();
  size_t bytes = std::min(piece.size(), text.size() - from);
  std::copy_n(text.data() + from, bytes, piece.begin());
  served.get<"bytes">().plain() = bytes;
  served.get<"total">().plain() = text.size();
  served.close(status);
}

}  // namespace

void addGraphTextHandlers(HandlerTable& table) { table.add<Text>(&graphText); }

}  // namespace gpupool::server
