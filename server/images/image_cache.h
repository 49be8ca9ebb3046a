#pragma once
// Code images by content in a folder: one file an image, named by the content's digest and length. A
// program's code crosses the network once per server; later sessions of the same tenant map the file.
//
//   <root>/<tenant>/<digest>-<length>    the bytes; behind them, once known, a note (ImageNote)
//   <root>/<tenant>/<random>.part        being written
//
// A process opens the folder once (openFolder) or is handed its descriptor, and names files relative to it: a
// worker opens nothing by a path of its own. Any number of processes use a folder at once. A file is written
// under a name of its own and renamed when its digest is the one it was announced by; a finished file's bytes
// never change. Nothing is synced: whoever opens a file hashes it first, so what a crash, a full disk or a
// bad block left is found, removed and asked for again. The folder is the tenant's: an image can be had by
// naming its digest, so no other tenant may look there.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/content.h"

namespace gpupool::server {

struct ImageKey {
  Digest digest{};
  uint64_t bytes = 0;
  auto operator<=>(const ImageKey&) const = default;
};

// What was found out about an image for devices of one architecture.
struct ImageNote {
  uint32_t architecture = 0;  // compute capability × 10
  uint32_t mayPrint = 0;
};

// An image in memory: mapped, read-only, with at least one zero byte behind it (texts end there). Immutable
// but for the note; any thread.
class Image {
 public:
  // Maps the first `bytes` of the file. Null if there is no memory for it.
  static std::shared_ptr<Image> map(int file, uint64_t bytes);
  ~Image();
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  std::span<const std::byte> bytes() const { return {data_, bytes_}; }
  // Drops the pages from memory; a later access reads them from the file again.
  void settle() const;
  // Its file in the cache's folder, where its note is kept; empty: none.
  std::string file;
  std::optional<ImageNote> note;

 private:
  Image(std::byte* data, uint64_t bytes, size_t reserved) : data_(data), bytes_(bytes), reserved_(reserved) {}
  std::byte* data_;
  uint64_t bytes_;
  size_t reserved_;
};

class ImageWriter;

// A descriptor of one's own; -1: none.
class Descriptor {
 public:
  explicit Descriptor(int number = -1) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();
  operator int() const { return number_; }
  // The caller's to close from here on.
  int release() { return std::exchange(number_, -1); }

 private:
  int number_;
};

// For ImageCache; -1, and errno, if it cannot be opened.
Descriptor openFolder(const std::string& path);

// One tenant's folder. Any thread.
class ImageCache {
 public:
  // folder: of a directory, or -1 for no cache: images are then in memory only. most: bytes of files kept in
  // the folder; those unused for longest go first.
  explicit ImageCache(Descriptor folder = Descriptor(), uint64_t most = 0)
      : folder_(std::move(folder)), most_(most) {}

  // The image, its bytes verified; null if it is not here (or was damaged: then it is gone).
  std::shared_ptr<Image> open(const ImageKey& key) const;
  // For an image that is not here. Null: no memory and no descriptor for it.
  std::unique_ptr<ImageWriter> write(const ImageKey& key) const;
  // Keeps a note with the image, where it has a file.
  void keepNote(const ImageKey& key, Image& image, const ImageNote& note) const;

  int folder() const { return folder_; }
  uint64_t most() const { return most_; }

 private:
  Descriptor folder_;
  uint64_t most_;
};

// Takes the bytes in order. If the disk is full or fails, it continues in memory and logs one line.
class ImageWriter {
 public:
  ImageWriter(const ImageCache& cache, const ImageKey& key);
  ~ImageWriter();
  ImageWriter(const ImageWriter&) = delete;
  ImageWriter& operator=(const ImageWriter&) = delete;

  uint64_t written() const { return written_; }
  bool append(std::span<const std::byte> bytes);  // false: no memory either
  // All bytes were appended. Null if their digest is another one, or there is no memory to map them.
  std::shared_ptr<Image> finish();
  bool open() const { return file_ >= 0; }

 private:
  void toMemory(const char* doing);
  bool put(std::span<const std::byte> bytes);

  const ImageCache& cache_;
  ImageKey key_;
  ContentHash hash_;
  uint64_t written_ = 0;
  Descriptor file_;
  std::string part_;  // the file's name until it is finished; empty: in memory
};

// Removes the files unused for longest, in the folder `root` and `depth` levels of folders below, until
// `most` bytes are left, and what writers left behind. The bytes left. Files that others remove meanwhile do
// not matter.
uint64_t trimImages(int root, uint64_t most, int depth = 0);

}  // namespace gpupool::server
