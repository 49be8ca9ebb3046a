// Memory both processes map: a sealed memfd. The seals are what make it safe to touch: without F_SEAL_SHRINK
// the peer could truncate it and every access would raise SIGBUS (memfd_create(2), "File sealing").

#include <fcntl.h>
#include <linux/magic.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "base/memory_info.h"
#include "transports/descriptor.h"
#include "transports/transport.h"

namespace gpupool::transport {

std::string errorText(const std::string& what) { return what + ": " + std::strerror(errno); }

Descriptor newEvent() {
  Descriptor event(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event) throw std::runtime_error(errorText("transport: eventfd"));
  return event;
}

void signalEvent(const Descriptor& event) {
  uint64_t one = 1;
  [[maybe_unused]] ssize_t written = ::write(event.get(), &one, sizeof one);  // full: it is readable already
}

void clearEvent(const Descriptor& event) {
  uint64_t count;
  [[maybe_unused]] ssize_t got = ::read(event.get(), &count, sizeof count);
}

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

size_t wholePages(size_t bytes) {
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t rounded = (bytes + page - 1) & ~(page - 1);
  if (bytes == 0 || rounded < bytes || rounded > size_t{1} << 46) {
    throw std::runtime_error("shared memory: a size of " + std::to_string(bytes) + " bytes is not possible");
  }
  return rounded;
}

// What could be had without killing anybody; without /proc, anything.
size_t availableMemory() {
  std::ifstream file("/proc/meminfo");
  const MemoryInfo memory = readMemoryInfo(file);
  return memory.available != 0 ? memory.available + memory.freeSwap : SIZE_MAX;
}

// Where the size of files is limited the kernel signals, and the default is to kill the process. What it
// sends while this lives is taken back, also where the caller has blocked the signal and will let it through
// later.
class FileSizeSignalBlocked {
 public:
  FileSizeSignalBlocked() {
    sigemptyset(&signal_);
    sigaddset(&signal_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signal_, &before_);
    sigset_t pending;
    sigpending(&pending);
    waited_ = sigismember(&pending, SIGXFSZ) == 1;
  }
  ~FileSizeSignalBlocked() {
    const timespec now{};
    if (!waited_) sigtimedwait(&signal_, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  FileSizeSignalBlocked(const FileSizeSignalBlocked&) = delete;
  FileSizeSignalBlocked& operator=(const FileSizeSignalBlocked&) = delete;

 private:
  sigset_t signal_, before_;
  bool waited_;  // before already: somebody else's
};

std::byte* mapShared(int descriptor, size_t bytes, void* fixedAddress, uint64_t offset = 0) {
  int flags = MAP_SHARED | (fixedAddress ? MAP_FIXED : 0);
  void* at = mmap(fixedAddress, bytes, PROT_READ | PROT_WRITE, flags, descriptor, static_cast<off_t>(offset));
  if (at == MAP_FAILED) throw std::runtime_error(errorText("shared memory: mmap"));
  return static_cast<std::byte*>(at);
}

// With its pages. Pages made when they are touched could be missing then, which is SIGBUS in whoever touches
// them: here it is an error.
void resize(int descriptor, size_t bytes) {
  const size_t available = availableMemory();
  if (bytes > available)
    throw ShortOfMemory("shared memory: " + std::to_string(bytes >> 20) +
                        " MiB are wanted and this machine has " + std::to_string(available >> 20) +
                        " MiB left");
  const FileSizeSignalBlocked blocked;
  int failed = ftruncate(descriptor, static_cast<off_t>(bytes)) != 0 ? errno : 0;
  while (failed == 0 && fallocate(descriptor, 0, 0, static_cast<off_t>(bytes)) != 0) {
    if (errno == EOPNOTSUPP) break;
    if (errno != EINTR) failed = errno;
  }
  if (failed == 0) return;
  const char* remedy = failed == EFBIG                        ? "; raise the limit of file sizes (ulimit -f)"
                       : failed == ENOSPC || failed == ENOMEM ? "; this machine is short of memory"
                                                              : "";
  throw ShortOfMemory("shared memory: " + std::to_string(bytes) + " bytes: " + std::strerror(failed) +
                      remedy);
}

// Only a memfd on tmpfs has both: seals, and pages that are there as long as the size is (hugetlbfs does
// not).
void checkReceived(int descriptor, size_t bytes) {
  struct stat status;
  struct statfs filesystem;
  if (fstat(descriptor, &status) != 0 || fstatfs(descriptor, &filesystem) != 0) {
    throw std::runtime_error(errorText("shared memory: received descriptor"));
  }
  if (filesystem.f_type != TMPFS_MAGIC) throw std::runtime_error("shared memory: not a memfd");
  int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) {
    throw std::runtime_error("shared memory: the peer's memory is not sealed against resizing");
  }
  if (seals & F_SEAL_WRITE) throw std::runtime_error("shared memory: the peer's memory is read-only");
  if (static_cast<uint64_t>(status.st_size) != bytes) {
    throw std::runtime_error("shared memory: the peer announced " + std::to_string(bytes) +
                             " bytes, the file has " + std::to_string(status.st_size));
  }
}

// Whose pages stay in memory, and which has them there where it is mapped.
void checkFile(int descriptor, uint64_t offset, size_t bytes) {
  struct stat status;
  struct statfs filesystem;
  if (fstat(descriptor, &status) != 0 || fstatfs(descriptor, &filesystem) != 0)
    throw std::runtime_error(errorText("shared memory: a file's descriptor"));
  if (!S_ISREG(status.st_mode) || filesystem.f_type != TMPFS_MAGIC)
    throw std::runtime_error("shared memory: not a file in memory");
  if ((fcntl(descriptor, F_GETFL) & O_ACCMODE) != O_RDWR)
    throw std::runtime_error("shared memory: a file that is not open for reading and writing");
  const uint64_t end = status.st_size > 0 ? wholePages(static_cast<size_t>(status.st_size)) : 0;
  if (offset > end || bytes > end - offset || offset % static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) != 0)
    throw std::runtime_error("shared memory: not pages of the file");
}

}  // namespace

SharedMemory::SharedMemory(std::byte* data, size_t size, int descriptor, bool restoreReservation)
    : data_(data), size_(size), descriptor_(descriptor), restoreReservation_(restoreReservation) {}

std::shared_ptr<SharedMemory> SharedMemory::create(size_t bytes, void* fixedAddress) {
  bytes = wholePages(bytes);
  Descriptor memory(memfd_create("gpupool", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) throw std::runtime_error(errorText("shared memory: memfd_create"));
  resize(memory.get(), bytes);
  if (fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) {
    throw std::runtime_error(errorText("shared memory: cannot seal"));
  }
  std::byte* data = mapShared(memory.get(), bytes, fixedAddress);
  return std::shared_ptr<SharedMemory>(
      new SharedMemory(data, bytes, memory.release(), fixedAddress != nullptr));
}

std::shared_ptr<SharedMemory> SharedMemory::adopt(int descriptor, size_t bytes, void* fixedAddress) {
  Descriptor memory(descriptor);
  bytes = wholePages(bytes);
  checkReceived(memory.get(), bytes);
  std::byte* data = mapShared(memory.get(), bytes, fixedAddress);
  return std::shared_ptr<SharedMemory>(
      new SharedMemory(data, bytes, memory.release(), fixedAddress != nullptr));
}

std::shared_ptr<SharedMemory> SharedMemory::ofFile(int descriptor, uint64_t offset, size_t bytes,
                                                   void* fixedAddress) {
  Descriptor file(descriptor);
  bytes = wholePages(bytes);
  checkFile(file.get(), offset, bytes);
  std::byte* data = mapShared(file.get(), bytes, fixedAddress, offset);
  std::shared_ptr<SharedMemory> memory(
      new SharedMemory(data, bytes, file.release(), fixedAddress != nullptr));
  memory->ofFile_ = true;
  memory->offset_ = offset;
  return memory;
}

std::shared_ptr<SharedMemory> SharedMemory::borrow(void* data, size_t bytes) {
  return std::shared_ptr<SharedMemory>(new SharedMemory(static_cast<std::byte*>(data), bytes, -1, false));
}

SharedMemory::~SharedMemory() {
  if (descriptor_ < 0 && !ofFile_) return;  // borrowed
  bool replaced = restoreReservation_ &&
                  mmap(data_, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                       0) != MAP_FAILED;
  if (!replaced) munmap(data_, size_);
  closeDescriptor();
}

void SharedMemory::closeDescriptor() {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

void SharedMemory::takePages(const SharedMemory& from) {
  if (from.size_ != size_ || from.descriptor_ < 0 || descriptor_ < 0 || ofFile_ || from.ofFile_)
    throw std::runtime_error("shared memory: its pages cannot be exchanged for these");
  Descriptor next(fcntl(from.descriptor_, F_DUPFD_CLOEXEC, 0));
  if (!next) throw std::runtime_error(errorText("shared memory: descriptor"));
  mapShared(next.get(), size_, data_);
  ::close(std::exchange(descriptor_, next.release()));
}

Lent::Lent(Connection& connection, void* data, size_t bytes) : connection_(connection) {
  if (connection.mapsMemory() || bytes == 0) return;
  auto memory = SharedMemory::borrow(data, bytes);
  memory_ = memory;
  region_ = connection.share(std::move(memory));
}

Lent::~Lent() {
  if (region_ == Region{}) return;
  connection_.unshare(region_);
  // Transfers end with their data or with the peer, and the transport bounds both.
  for (int round = 0; !memory_.expired(); ++round) {
    if (round < 100)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace gpupool::transport
