// Which file the program has mapped where.
#include "client/memory/mapped_files.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <string>

#include "catch.h"

using namespace gpupool::client;

namespace {

constexpr size_t kPage = 4096, kBytes = 8 * kPage;

// A file in memory, with a name or without one.
struct File {
  explicit File(bool named) {
    if (named) path = "/dev/shm/gpupool-test-" + std::to_string(getpid());
    descriptor = named ? open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600)
                       : memfd_create("test", MFD_CLOEXEC);
    REQUIRE(descriptor >= 0);
    REQUIRE(ftruncate(descriptor, kBytes) == 0);
    struct stat status;
    REQUIRE(fstat(descriptor, &status) == 0);
    inode = status.st_ino;
  }
  ~File() {
    if (!path.empty()) unlink(path.c_str());
    if (descriptor >= 0) close(descriptor);
  }
  void forget() { close(std::exchange(descriptor, -1)); }
  // Is it this one, from that offset, and can it be written to?
  bool is(const std::optional<MappedFile>& found, uint64_t offset) const {
    struct stat status;
    return found && fstat(found->descriptor.get(), &status) == 0 && status.st_ino == inode &&
           found->offset == offset && (fcntl(found->descriptor.get(), F_GETFL) & O_ACCMODE) == O_RDWR;
  }
  std::string path;
  int descriptor = -1;
  ino_t inode = 0;
};

struct Mapped {
  Mapped(int descriptor, int flags, int protection = PROT_READ | PROT_WRITE, off_t offset = 0,
         size_t size = kBytes, void* fixed = nullptr)
      : bytes(size) {
    at = mmap(fixed, bytes, protection, flags | (fixed != nullptr ? MAP_FIXED : 0), descriptor, offset);
    REQUIRE(at != MAP_FAILED);
  }
  ~Mapped() { munmap(at, bytes); }
  uint64_t address(size_t offset = 0) const { return reinterpret_cast<uint64_t>(at) + offset; }
  void* at;
  size_t bytes;
};

bool mayUseKernelsLinks() { return access("/proc/self/map_files", R_OK | X_OK) == 0 && geteuid() == 0; }

}  // namespace

TEST_CASE("lines of the kernel's table") {
  auto file =
      parseMapping("7f0000001000-7f0000005000 rw-s 00003000 00:1a 4711    /dev/shm/two words (deleted)");
  REQUIRE(file);
  CHECK(file->start == 0x7f0000001000);
  CHECK(file->end == 0x7f0000005000);
  CHECK(file->readable);
  CHECK(file->writable);
  CHECK(file->shared);
  CHECK(file->offset == 0x3000);
  CHECK(file->device == makedev(0, 0x1a));
  CHECK(file->inode == 4711);
  CHECK(file->path == "/dev/shm/two words (deleted)");
  CHECK_FALSE(isSegmentOfNccl(*file));
  file->path = "/dev/shm/nccl-5vXy7a (deleted)";
  CHECK(isSegmentOfNccl(*file));
  file->shared = false;
  CHECK_FALSE(isSegmentOfNccl(*file));
  auto code = parseMapping("400000-401000 r-xp 00000000 103:02 18446744073709551615 /bin/cat");
  REQUIRE(code);
  CHECK_FALSE(code->writable);
  CHECK_FALSE(code->shared);
  CHECK(code->device == makedev(0x103, 2));
  CHECK(code->inode == 18446744073709551615u);
  auto none = parseMapping("7f0000001000-7f0000005000 rw-p 00000000 00:00 0 ");
  REQUIRE(none);
  CHECK(none->inode == 0);
  CHECK(none->path.empty());
  for (const char* bad :
       {"", "7f0000001000", "7f0000001000-7f0000005000 rw-s", "nothing-of-the-kind rw-s 0 0:0 1 x"})
    CHECK_FALSE(parseMapping(bad));
}

TEST_CASE("a shared mapping has its file, wherever in it") {
  File file(GENERATE(true, false));
  const Mapped all(file.descriptor, MAP_SHARED),
      part(file.descriptor, MAP_SHARED, PROT_READ | PROT_WRITE, 2 * kPage, 4 * kPage);
  CHECK(file.is(mappedFile(all.address(), kBytes), 0));
  CHECK(file.is(mappedFile(all.address(3 * kPage), kPage), 3 * kPage));
  CHECK(file.is(mappedFile(part.address(kPage), 3 * kPage), 3 * kPage));
  CHECK_FALSE(mappedFile(part.address(kPage), 4 * kPage));
}

TEST_CASE("memory that no file is behind, or not for others, or not to write, has none") {
  File file(false);
  const Mapped nobodys(-1, MAP_PRIVATE | MAP_ANONYMOUS), own(file.descriptor, MAP_PRIVATE),
      read(file.descriptor, MAP_SHARED, PROT_READ);
  CHECK_FALSE(mappedFile(nobodys.address(), kPage));
  CHECK_FALSE(mappedFile(own.address(), kPage));
  CHECK_FALSE(mappedFile(read.address(), kPage));
  CHECK_FALSE(mappedFile(kPage, kPage));
  CHECK_FALSE(mappedFile(UINT64_MAX - kPage, kPage));
}

TEST_CASE("two mappings side by side are not one") {
  File file(false);
  const Mapped room(-1, MAP_PRIVATE | MAP_ANONYMOUS, PROT_NONE);
  const Mapped first(file.descriptor, MAP_SHARED, PROT_READ | PROT_WRITE, 0, kPage, room.at);
  const Mapped second(file.descriptor, MAP_SHARED, PROT_READ | PROT_WRITE, 4 * kPage, kPage,
                      static_cast<char*>(room.at) + kPage);
  CHECK(file.is(mappedFile(first.address(), kPage), 0));
  CHECK(file.is(mappedFile(second.address(), kPage), 4 * kPage));
  CHECK_FALSE(mappedFile(first.address(), 2 * kPage));
}

TEST_CASE("a file is found by its name, or by a descriptor of the program's") {
  File file(true);
  const Mapped all(file.descriptor, MAP_SHARED);
  SECTION("its name alone") {
    file.forget();
    CHECK(file.is(mappedFile(all.address(), kBytes), 0));
  }
  SECTION("its descriptor alone, which may only read") {
    const int reads = open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
    unlink(file.path.c_str());
    file.forget();
    CHECK(file.is(mappedFile(all.address(), kBytes), 0));
    close(reads);
  }
  SECTION("another file has its name") {
    unlink(file.path.c_str());
    const int other = open(file.path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(file.is(mappedFile(all.address(), kBytes), 0));
    file.forget();
    if (!mayUseKernelsLinks()) CHECK_FALSE(mappedFile(all.address(), kBytes));
    close(other);
  }
}
