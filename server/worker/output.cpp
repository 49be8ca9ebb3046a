#include "server/worker/output.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "base/log.h"

namespace gpupool::server {
namespace {

// As the driver writes them: "file.cu:8: void f(int): block: [0,0,0], thread: [40,0,0] Assertion `...`
// failed."
bool isAssertion(std::string_view line) {
  return line.find("thread: [") != line.npos && line.find("Assertion `") != line.npos &&
         line.find("` failed.") != line.npos;
}

void putAll(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(descriptor, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // nobody left to tell
    text.remove_prefix(static_cast<size_t>(n));
  }
}

// The last words of a process that aborts are in the memory file: they are handed on before it is gone.
volatile int abortFrom = -1, abortTo = -1;
void onAbort(int signal) {
  char block[4096];
  long at = 0;
  for (ssize_t n; abortFrom >= 0 && (n = pread(abortFrom, block, sizeof block, at)) > 0; at += n)
    if (::write(abortTo, block, static_cast<size_t>(n)) < 0) break;
  ::signal(signal, SIG_DFL);
  raise(signal);
}

}  // namespace

void Output::Captured::open(int descriptor) {
  file = memfd_create("gpupool-output", MFD_CLOEXEC);
  if (file < 0 || fcntl(file, F_SETFL, O_APPEND) != 0 || dup2(file, descriptor) < 0)
    throw std::runtime_error(std::string("cannot capture device output: ") + std::strerror(errno));
}

std::string Output::Captured::take(size_t most) {
  struct stat info{};
  if (fstat(file, &info) != 0 || info.st_size <= read) return {};
  std::string text(std::min<size_t>(static_cast<size_t>(info.st_size - read), most), '\0');
  const ssize_t n = pread(file, text.data(), text.size(), read);
  if (n <= 0) return {};
  text.resize(static_cast<size_t>(n));
  read += n;
  // Given back without moving the file's end, where another thread may be writing.
  constexpr long kPage = 4096;
  if (read >= kPage) fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, read / kPage * kPage);
  return text;
}

Output::Output() {
  kept_ = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3);
  if (kept_ < 0) throw std::runtime_error(std::string("cannot keep stderr: ") + std::strerror(errno));
  text_.open(STDOUT_FILENO);
  errors_.open(STDERR_FILENO);
  log::setDescriptor(kept_);
  abortFrom = errors_.file;
  abortTo = kept_;
  ::signal(SIGABRT, &onAbort);
}

Output::~Output() {
  abortFrom = -1;
  log::setDescriptor(STDERR_FILENO);
  for (int file : {text_.file, errors_.file, kept_})
    if (file >= 0) close(file);
}

std::string Output::take() {
  std::lock_guard lock(mutex_);
  std::fflush(stdout);
  return text_.take(kMost);
}

std::string Output::takeErrors() {
  std::lock_guard lock(mutex_);
  const std::string all = errors_.take(kMostErrors);
  std::string device, other;
  for (size_t begin = 0; begin < all.size();) {
    const size_t newline = all.find('\n', begin);
    const size_t end = newline == all.npos ? all.size() : newline + 1;
    const auto line = std::string_view(all).substr(begin, end - begin);
    (isAssertion(line) ? device : other) += line;
    begin = end;
  }
  putAll(kept_, other);
  return device;
}

}  // namespace gpupool::server
