#pragma once
// The code images of a session: offered by name, taken from the tenant's cache or sent once, hashed here
// before anything uses them, and held no longer than until they were loaded. Bounded: images that wait to be
// loaded may be kMostBytes together.

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "schema/session_calls.h"
#include "server/fatbin/symbols.h"
#include "server/images/image_cache.h"

namespace gpupool::server {

class Images {
 public:
  static constexpr uint64_t kMostBytes = uint64_t{4} << 30;
  static constexpr size_t kMostNames = 4096;  // offered and not loaded yet

  explicit Images(ImageCache cache = ImageCache()) : cache_(std::move(cache)) {}

  // Is the image here? From the cache it is read and hashed meanwhile: takes time. Every offer that a load
  // follows holds the image for that load.
  bool offer(const schema::ImageName& name);
  // The next piece; pieces come in order, and may come again. CUDA_ERROR_INVALID_VALUE for anything else,
  // INVALID_IMAGE if the finished bytes are not what their name says, OUT_OF_MEMORY beyond the bounds.
  CUresult append(const schema::ImageName& name, size_t offset, std::span<const std::byte> data);
  // The image for one load. Null: neither here nor sent.
  std::shared_ptr<Image> take(const schema::ImageName& name);
  // The image, for another worker: held here, or from the cache. Null: neither.
  std::shared_ptr<Image> find(const schema::ImageName& name);
  void keepNote(const schema::ImageName& name, Image& image, const ImageNote& note) {
    cache_.keepNote(key(name), image, note);
  }

  // The fatbins of a device-linked program: the linked one first, then those it was linked from. False: they
  // do not lie within the bytes.
  static constexpr uint64_t kMostParts = 4096;
  static bool readLinked(std::span<const std::byte> bytes, std::vector<std::span<const std::byte>>& parts);

  // What is in the code of an image that is in the cache, read once; it stays here. Null: the image is not in
  // the cache, or cannot be read. kind: as in sessionModuleLoad.
  struct Contents {
    std::vector<fatbin::Symbol> variables;
    bool mayAllocate = false;  // kernels may use the device's heap
  };
  const Contents* contents(const schema::ImageName& name, unsigned kind, unsigned architecture);

  // What was offered and not loaded yet. arriving: its bytes are on their way.
  struct Pending {
    schema::ImageName name;
    unsigned loads = 0;  // that were announced
    bool here = false, arriving = false;
  };
  std::vector<Pending> pending();

  // What the driver may read until `owner` (a library) is unloaded.
  void keep(uint64_t owner, std::shared_ptr<const void> code);
  void release(uint64_t owner);

 private:
  struct Held {
    unsigned owed = 0;  // loads that were announced
    std::shared_ptr<Image> image;
    std::unique_ptr<ImageWriter> writer;
  };
  static ImageKey key(const schema::ImageName& name) {
    ImageKey key;
    static_assert(sizeof key.digest == sizeof name.words);
    std::memcpy(key.digest.data(), name.words, sizeof name.words);
    key.bytes = name.bytes;
    return key;
  }
  bool reserve(uint64_t bytes);  // under mutex_

  const ImageCache cache_;
  std::mutex mutex_;
  std::map<ImageKey, Held> held_;
  uint64_t heldBytes_ = 0;  // of images and of those being written, as their names say
  std::map<uint64_t, std::shared_ptr<const void>> kept_;
  std::map<ImageKey, Contents> contents_;
};

}  // namespace gpupool::server
