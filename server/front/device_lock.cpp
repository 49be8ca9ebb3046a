#include "server/front/device_lock.h"

#include <kj/debug.h>
#include <kj/exception.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <vector>

#include "base/process_name.h"
#include "server/front/lock_file.h"

namespace gpupool::server {
namespace {

constexpr size_t kMaxText = 4096;

// "pid<TAB>start ticks<TAB>name<TAB>identity<NEWLINE>"
std::string line(const LockOwner& owner) {
  return std::to_string(owner.pid) + "\t" + std::to_string(owner.startTicks) + "\t" + owner.server + "\t" +
         owner.identity + "\n";
}

LockOwner readOwner(int file) {
  std::string text(kMaxText, '\0');
  const ssize_t bytes = pread(file, text.data(), text.size(), 0);
  text.resize(bytes > 0 ? static_cast<size_t>(bytes) : 0);
  text.resize(std::min(text.find('\n'), text.size()));
  std::vector<std::string> fields(1);
  for (char c : text) {
    if (c == '\t') {
      fields.emplace_back();
    } else {
      fields.back() += std::isprint(static_cast<unsigned char>(c)) != 0 ? c : '?';
    }
  }
  if (fields.size() != 4) return {};
  LockOwner owner;
  owner.pid = static_cast<pid_t>(std::strtol(fields[0].c_str(), nullptr, 10));
  owner.startTicks = std::strtoull(fields[1].c_str(), nullptr, 10);
  owner.server = fields[2];
  owner.identity = fields[3];
  return owner;
}

}  // namespace

bool LockOwner::lives() const { return startTicks != 0 && processStartTicks(pid) == startTicks; }

std::string LockOwner::text() const {
  if (pid == 0) return "another process";
  const std::string name = "gpupool-server " + server + " (process " + std::to_string(pid) + ")";
  return lives() ? name : "a worker of " + name + ", which has ended,";
}

DeviceLock::DeviceLock(const std::string& folder, const std::string& uuid)
    : path_(folder + "/gpupool-" + uuidText(uuid) + ".lock") {}

kj::AutoCloseFd DeviceLock::openFile() const { return openLockFile(path_, "the lock of a GPU"); }

// False: the file was removed, and perhaps made again, since we opened it.
bool DeviceLock::isCurrent(int file) const {
  struct stat ours{}, named{};
  return fstat(file, &ours) == 0 && stat(path_.c_str(), &named) == 0 && ours.st_ino == named.st_ino &&
         ours.st_dev == named.st_dev;
}

bool DeviceLock::take(const LockOwner& me) {
  for (;;) {
    auto file = openFile();
    if (flock(file, LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) KJ_FAIL_SYSCALL("flock", errno, path_.c_str());
      holder_ = readOwner(file);
      return false;
    }
    if (!isCurrent(file)) continue;
    name(kj::mv(file), me);
    return true;
  }
}

// A worker is not trusted: the kernel says whether this is the lock's file, and locked by this descriptor.
bool DeviceLock::takeBack(kj::AutoCloseFd& file, const LockOwner& me) {
  if (file_.get() >= 0 || !isCurrent(file) || flock(file, LOCK_EX | LOCK_NB) != 0) return false;
  name(kj::mv(file), me);
  return true;
}

void DeviceLock::name(kj::AutoCloseFd file, const LockOwner& me) {
  const std::string text = line(me);
  // For people: a lock without a name is one, too.
  if (ftruncate(file, 0) == 0 && pwrite(file, text.data(), text.size(), 0) < 0) errno = 0;
  file_ = kj::mv(file);
  holder_ = me;
}

void DeviceLock::release() {
  if (file_.get() < 0) return;
  file_ = nullptr;
  // Once more, alone: a worker that lives on keeps its file. Where it cannot be opened, nothing is left to
  // remove.
  kj::runCatchingExceptions([this] {
    auto file = openFile();
    if (flock(file, LOCK_EX | LOCK_NB) == 0 && isCurrent(file)) unlink(path_.c_str());
  });
}

std::string uuidText(const std::string& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < uuid.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += "0123456789abcdef"[static_cast<unsigned char>(uuid[i]) >> 4];
    text += "0123456789abcdef"[static_cast<unsigned char>(uuid[i]) & 15];
  }
  return text;
}

}  // namespace gpupool::server
