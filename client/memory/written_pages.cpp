#include "client/memory/written_pages.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "base/log.h"

namespace gpupool::client {

namespace {

// Of <linux/userfaultfd.h> and <linux/fs.h> of Linux 6.7; the headers here may be older.
constexpr int kUserModeOnly = 1;
constexpr uint64_t kSharedMemory = 1 << 12, kUnpopulated = 1 << 13, kAsync = 1 << 15;
struct PageRegion {
  uint64_t start = 0, end = 0, categories = 0;
};
struct ScanArguments {
  uint64_t size = sizeof(ScanArguments), flags = 0, start = 0, end = 0, walkEnd = 0, regions = 0,
           regionCount = 0, mostPages = 0, inverted = 0, all = 0, any = 0, returned = 0;
};
constexpr uint64_t kProtectMatching = 1, kMustBeAsync = 2, kWatched = 1 << 0, kWritten = 1 << 1;
constexpr unsigned long kScan = _IOWR('f', 16, ScanArguments);

bool oneOf(std::string_view text, std::initializer_list<std::string_view> some) {
  return std::ranges::find(some, text) != some.end();
}

bool knownDevice(std::string_view path) {
  return path.starts_with("/dev/pts/") ||
         oneOf(path, {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty",
                      "/dev/ptmx", "/dev/console"});
}

// What an open file is called that is none of a file system's.
bool harmless(std::string_view name) {
  if (name.starts_with("socket:") || name.starts_with("pipe:")) return true;
  constexpr std::string_view kAnonymous = "anon_inode:";
  if (!name.starts_with(kAnonymous)) return false;
  name.remove_prefix(kAnonymous.size());
  return name == "inotify" || oneOf(name, {"[eventfd]", "[eventpoll]", "[signalfd]", "[timerfd]",
                                           "[userfaultfd]", "[pidfd]", "[perf_event]", "[fanotify]"});
}

bool onlyProcessorsWriteFor(int descriptor, const char* entry) {
  std::array<char, 256> name{};
  const std::string link = std::string("/proc/self/fd/") + entry;
  const ssize_t length = ::readlink(link.c_str(), name.data(), name.size() - 1);
  if (length < 0) return errno == ENOENT;  // closed meanwhile
  if (name[0] != '/') return harmless({name.data(), static_cast<size_t>(length)});
  struct stat status{};
  if (::fstat(descriptor, &status) != 0) return errno == EBADF;
  if (S_ISCHR(status.st_mode)) return knownDevice({name.data(), static_cast<size_t>(length)});
  const int flags = ::fcntl(descriptor, F_GETFL);
  return flags >= 0 ? (flags & O_DIRECT) == 0 : errno == EBADF;
}

}  // namespace

WrittenPages* WrittenPages::get() {
  static WrittenPages* const pages = [] {
    WrittenPages* opened = open();
    if (opened != nullptr)
      pthread_atfork([] { get()->mutex_.lock(); }, [] { get()->mutex_.unlock(); },
                     [] {
                       for (const auto& [address, bytes] : get()->watched_)
                         ::mprotect(reinterpret_cast<void*>(address), bytes, PROT_READ);
                       get()->mutex_.unlock();
                     });
    return opened;
  }();
  return pages;
}

WrittenPages* WrittenPages::open() {
  if (const char* text = std::getenv("GPUPOOL_TRACK_WRITES");
      text != nullptr && std::string_view(text) == "0")
    return nullptr;
  const int faults = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | kUserModeOnly));
  uffdio_api wanted{};
  wanted.api = UFFD_API;
  wanted.features = kSharedMemory | kUnpopulated | kAsync;
  const int pagemap = faults < 0 ? -1 : ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  ScanArguments nothing;  // an empty range: an error where the kernel knows no such call
  if (pagemap >= 0 && ::ioctl(faults, UFFDIO_API, &wanted) == 0 && ::ioctl(pagemap, kScan, &nothing) == 0)
    return new WrittenPages(faults, pagemap);  // for as long as the process lives
  GPUPOOL_DEBUG("mirrored memory is compared whole: this kernel does not say which pages were written (%s)",
                std::strerror(errno));
  if (pagemap >= 0) ::close(pagemap);
  if (faults >= 0) ::close(faults);
  return nullptr;
}

bool WrittenPages::watch(uint64_t address, size_t bytes) {
  uffdio_register range{};
  range.range = {address, bytes};
  range.mode = UFFDIO_REGISTER_MODE_WP;
  std::lock_guard lock(mutex_);
  if (::ioctl(faults_, UFFDIO_REGISTER, &range) != 0) return false;
  watched_[address] = bytes;
  return true;
}

void WrittenPages::unwatch(uint64_t address) {
  std::lock_guard lock(mutex_);
  const auto known = watched_.find(address);
  if (known == watched_.end()) return;
  uffdio_range range{address, known->second};
  ::ioctl(faults_, UFFDIO_UNREGISTER, &range);
  watched_.erase(known);
}

bool WrittenPages::protect(uint64_t address, size_t bytes) {
  ScanArguments scan;
  scan.flags = kProtectMatching | kMustBeAsync;
  scan.start = address;
  scan.end = address + bytes;
  scan.all = kWritten;
  return ::ioctl(pagemap_, kScan, &scan) >= 0 && scan.walkEnd == scan.end;
}

bool WrittenPages::written(uint64_t address, size_t bytes, std::vector<Range>& ranges) {
  ranges.clear();
  std::array<PageRegion, 128> regions;
  ScanArguments scan;
  scan.end = address + bytes;
  scan.inverted = kWatched;
  scan.any = kWatched | kWritten;
  scan.regions = reinterpret_cast<uint64_t>(regions.data());
  scan.regionCount = regions.size();
  for (scan.start = address; scan.start < scan.end; scan.start = scan.walkEnd) {
    const int count = ::ioctl(pagemap_, kScan, &scan);
    if (count < 0 || scan.walkEnd <= scan.start) return false;
    for (int i = 0; i < count; ++i) ranges.push_back({regions[i].start, regions[i].end});
  }
  return true;
}

bool WrittenPages::onlyProcessorsWrite() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  if (folder == nullptr) return false;
  while (const dirent* entry = ::readdir(folder.get())) {
    if (entry->d_name[0] == '.') continue;
    if (!onlyProcessorsWriteFor(std::atoi(entry->d_name), entry->d_name)) return false;
  }
  return true;
}

}  // namespace gpupool::client
