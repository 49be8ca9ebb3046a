#include "server/images/image_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "base/log.h"

namespace gpupool::server {
namespace {

constexpr char kPartSuffix[] = ".part";
constexpr std::chrono::seconds kAbandoned =
    std::chrono::minutes(10);  // a writer that wrote nothing for so long is gone

// Behind the image's bytes. The check ties it to the content.
struct StoredNote {
  ImageNote note;
  uint64_t check = 0;
};
static_assert(sizeof(StoredNote) == 16);

uint64_t checkOf(const ImageKey& key, const ImageNote& note) {
  Sha256 hash;
  hash.update(key.digest);
  hash.update(std::as_bytes(std::span(&key.bytes, 1)));
  hash.update(std::as_bytes(std::span(&note, 1)));
  const Digest digest = hash.finish();
  uint64_t check;
  std::memcpy(&check, digest.data(), sizeof check);
  return check;
}

std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (std::byte b : bytes) {
    text += "0123456789abcdef"[std::to_integer<int>(b) >> 4];
    text += "0123456789abcdef"[std::to_integer<int>(b) & 15];
  }
  return text;
}

std::string fileOf(const ImageKey& key) { return hex(key.digest) + "-" + std::to_string(key.bytes); }

bool putAll(int file, std::span<const std::byte> bytes, uint64_t offset) {
  while (!bytes.empty()) {
    const ssize_t n = pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
  return true;
}

// The bytes of `from` up to `bytes` again in `to`.
bool copyAll(int from, int to, uint64_t bytes) {
  std::vector<std::byte> block(size_t{1} << 20);
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t n = pread(from, block.data(), std::min<uint64_t>(block.size(), bytes - at), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0 || !putAll(to, std::span(block).first(static_cast<size_t>(n)), at)) return false;
    at += static_cast<uint64_t>(n);
  }
  return true;
}

std::optional<ImageNote> readNote(int file, const ImageKey& key) {
  StoredNote stored;
  if (pread(file, &stored, sizeof stored, static_cast<off_t>(key.bytes)) != ssize_t{sizeof stored}) return {};
  if (stored.check != checkOf(key, stored.note)) return {};
  return stored.note;
}

}  // namespace

// ---- Descriptor

Descriptor::~Descriptor() {
  if (number_ >= 0) close(number_);
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  std::swap(number_, other.number_);
  return *this;
}

Descriptor openFolder(const std::string& path) {
  return Descriptor(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

// ---- Image

std::shared_ptr<Image> Image::map(int file, uint64_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t reserved = (bytes / page + 1) * page;  // always a byte more: the zero behind it
  void* whole = mmap(nullptr, reserved, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (whole == MAP_FAILED) return nullptr;
  std::shared_ptr<Image> image(new Image(static_cast<std::byte*>(whole), bytes, reserved));
  // Of a part of the last page that lies behind the file's end, zeros are mapped; a note may lie there.
  const size_t pages = bytes / page * page;
  if (pages != 0 && mmap(whole, pages, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED)
    return nullptr;
  if (pages == bytes) return image;
  auto* last = image->data_ + pages;
  if (mprotect(last, page, PROT_READ | PROT_WRITE) != 0) return nullptr;
  const ssize_t rest = pread(file, last, bytes - pages, static_cast<off_t>(pages));
  if (rest != static_cast<ssize_t>(bytes - pages) || mprotect(last, page, PROT_READ) != 0) return nullptr;
  return image;
}

Image::~Image() { munmap(data_, reserved_); }

void Image::settle() const {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (const size_t pages = bytes_ / page * page; pages != 0) madvise(data_, pages, MADV_DONTNEED);
}

// ---- ImageCache

std::shared_ptr<Image> ImageCache::open(const ImageKey& key) const {
  if (folder_ < 0) return nullptr;
  const std::string name = fileOf(key);
  const Descriptor file(openat(folder_, name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat info{};
  if (file < 0 || fstat(file, &info) != 0) return nullptr;
  const auto size = static_cast<uint64_t>(info.st_size);
  std::shared_ptr<Image> image;
  // A shorter file must not be mapped as if it were whole: touching the missing pages would kill the process.
  const bool whole = size == key.bytes || size == key.bytes + sizeof(StoredNote);
  if (whole) {
    image = Image::map(file, key.bytes);
    if (image == nullptr) return nullptr;
  }
  if (!whole || contentDigest(image->bytes()) != key.digest) {
    GPUPOOL_WARNING("module cache: %s is damaged and removed", name.c_str());
    unlinkat(folder_, name.c_str(), 0);
    return nullptr;
  }
  image->settle();          // hashing has touched every page; a load touches few
  futimens(file, nullptr);  // used now
  image->file = name;
  if (size > key.bytes) image->note = readNote(file, key);
  return image;
}

std::unique_ptr<ImageWriter> ImageCache::write(const ImageKey& key) const {
  auto writer = std::make_unique<ImageWriter>(*this, key);
  return writer->open() ? std::move(writer) : nullptr;
}

void ImageCache::keepNote(const ImageKey& key, Image& image, const ImageNote& note) const {
  image.note = note;
  if (image.file.empty()) return;
  const Descriptor file(openat(folder_, image.file.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat info{};
  if (file < 0 || fstat(file, &info) != 0 || static_cast<uint64_t>(info.st_size) < key.bytes) return;
  const StoredNote stored{note, checkOf(key, note)};
  // A note that is cut short (a full disk) would make the file look damaged.
  if (!putAll(file, std::as_bytes(std::span(&stored, 1)), key.bytes) &&
      ftruncate(file, static_cast<off_t>(key.bytes)) != 0)
    unlinkat(folder_, image.file.c_str(), 0);
}

// ---- ImageWriter

ImageWriter::ImageWriter(const ImageCache& cache, const ImageKey& key) : cache_(cache), key_(key) {
  if (cache.folder() >= 0 && key.bytes <= cache.most()) {
    std::byte random[8];
    randomBytes(random);
    part_ = hex(random) + kPartSuffix;
    file_ = Descriptor(openat(cache.folder(), part_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0660));
    if (file_ >= 0) return;
    part_.clear();
    toMemory("make a file");
    return;
  }
  file_ = Descriptor(memfd_create("gpupool-image", MFD_CLOEXEC));
}

ImageWriter::~ImageWriter() {
  if (!part_.empty()) unlinkat(cache_.folder(), part_.c_str(), 0);
}

// What was written goes along.
void ImageWriter::toMemory(const char* doing) {
  static std::atomic_flag told;
  if (!told.test_and_set())
    GPUPOOL_WARNING(
        "the module cache: cannot %s: %s; this session goes on without it: free space in the folder of the "
        "server's --module-cache, or name another one",
        doing, std::strerror(errno));
  Descriptor memory(memfd_create("gpupool-image", MFD_CLOEXEC));
  if (memory >= 0 && written_ != 0 && !copyAll(file_, memory, written_)) memory = Descriptor();
  if (!part_.empty()) unlinkat(cache_.folder(), part_.c_str(), 0);
  part_.clear();
  file_ = std::move(memory);
}

bool ImageWriter::put(std::span<const std::byte> bytes) {
  if (putAll(file_, bytes, written_)) return true;
  if (part_.empty()) return false;
  toMemory("write an image");
  return file_ >= 0 && putAll(file_, bytes, written_);
}

bool ImageWriter::append(std::span<const std::byte> bytes) {
  if (file_ < 0 || !put(bytes)) return false;
  hash_.update(bytes);
  written_ += bytes.size();
  return true;
}

std::shared_ptr<Image> ImageWriter::finish() {
  if (written_ != key_.bytes || hash_.finish() != key_.digest) return nullptr;
  auto image = Image::map(file_, key_.bytes);
  if (image == nullptr || part_.empty()) return image;
  const std::string name = fileOf(key_);
  if (renameat(cache_.folder(), part_.c_str(), cache_.folder(), name.c_str()) == 0) {
    part_.clear();
    image->file = name;
    trimImages(cache_.folder(), cache_.most());
  }
  return image;
}

// ---- trimming

namespace {

struct Kept {
  timespec used;
  uint64_t bytes;
  std::string name;
  std::shared_ptr<Descriptor> folder;
};

bool isPart(const std::string& name) { return name.ends_with(kPartSuffix); }

bool isAbandoned(const Kept& file) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  return isPart(file.name) && now.tv_sec - file.used.tv_sec > kAbandoned.count();
}

// What lies in `folder`, and in the folders below.
void list(Descriptor folder, int depth, std::vector<Kept>& files) {
  if (folder < 0) return;
  auto kept = std::make_shared<Descriptor>(std::move(folder));
  // The stream closes a descriptor of its own. Not opened: a worker may open no folder (server/walls/).
  const int own = fcntl(*kept, F_DUPFD_CLOEXEC, 0);
  DIR* stream = own >= 0 ? fdopendir(own) : nullptr;
  if (stream == nullptr) {
    if (own >= 0) close(own);
    return;
  }
  rewinddir(stream);  // the position is the folder's descriptor's
  while (const dirent* entry = readdir(stream)) {
    const std::string name = entry->d_name;
    struct stat info{};
    if (name == "." || name == ".." || fstatat(*kept, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0)
      continue;
    if (S_ISREG(info.st_mode))
      files.push_back({info.st_mtim, static_cast<uint64_t>(info.st_size), name, kept});
    if (S_ISDIR(info.st_mode) && depth > 0)
      list(Descriptor(openat(*kept, name.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW)),
           depth - 1, files);
  }
  closedir(stream);
}

}  // namespace

uint64_t trimImages(int root, uint64_t most, int depth) {
  std::vector<Kept> files;
  list(Descriptor(fcntl(root, F_DUPFD_CLOEXEC, 0)), depth, files);
  uint64_t total = 0;
  for (const Kept& file : files) total += file.bytes;
  std::sort(files.begin(), files.end(), [](const Kept& a, const Kept& b) {
    return std::pair(a.used.tv_sec, a.used.tv_nsec) < std::pair(b.used.tv_sec, b.used.tv_nsec);
  });
  for (const Kept& file : files) {
    if (isPart(file.name) ? !isAbandoned(file) : total <= most) continue;
    if (unlinkat(*file.folder, file.name.c_str(), 0) == 0 || errno == ENOENT) total -= file.bytes;
  }
  return total;
}

}  // namespace gpupool::server
