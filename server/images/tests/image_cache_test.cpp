// The cache of images: what is stored, what is refused, what goes first, and what several processes do to one
// folder.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <vector>

#include "server/images/image_cache.h"

#include "catch.h"

using namespace gpupool;
using namespace gpupool::server;
namespace fs = std::filesystem;

namespace {

using Bytes = std::vector<std::byte>;
constexpr uint64_t kMiB = uint64_t{1} << 20;

struct Folder {
  std::string path;
  Folder() {
    char name[] = "/tmp/gpupool-images-XXXXXX";
    path = mkdtemp(name);
  }
  ~Folder() { fs::remove_all(path); }
  std::vector<fs::path> files() const {
    std::vector<fs::path> all;
    for (auto& entry : fs::recursive_directory_iterator(path))
      if (entry.is_regular_file()) all.push_back(entry.path());
    return all;
  }
  fs::path only() const {
    auto all = files();
    REQUIRE(all.size() == 1);
    return all[0];
  }
};

// A cache of that folder.
ImageCache cacheAt(const std::string& path, uint64_t most) { return ImageCache(openFolder(path), most); }

Bytes content(size_t bytes, unsigned seed = 1) {
  std::mt19937_64 random(seed);
  Bytes all(bytes);
  for (size_t at = 0; at < bytes; at += 8) {
    const uint64_t word = random();
    std::memcpy(all.data() + at, &word, std::min<size_t>(8, bytes - at));
  }
  return all;
}

ImageKey keyOf(const Bytes& bytes) { return {contentDigest(bytes), bytes.size()}; }

// In pieces, as they come over the wire.
std::shared_ptr<Image> store(const ImageCache& cache, const Bytes& bytes, size_t piece = 256 << 10) {
  auto writer = cache.write(keyOf(bytes));
  REQUIRE(writer);
  for (size_t at = 0; at < bytes.size(); at += piece)
    REQUIRE(writer->append(std::span(bytes).subspan(at, std::min(piece, bytes.size() - at))));
  return writer->finish();
}

bool same(const std::shared_ptr<Image>& image, const Bytes& bytes) {
  return image != nullptr && image->bytes().size() == bytes.size() &&
         std::memcmp(image->bytes().data(), bytes.data(), bytes.size()) == 0 &&
         image->bytes().data()[bytes.size()] == std::byte{0};
}

void flip(const fs::path& file, uint64_t at) {
  std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
  stream.seekg(static_cast<std::streamoff>(at));
  char c = 0;
  stream.get(c);
  stream.seekp(static_cast<std::streamoff>(at));
  stream.put(static_cast<char>(c ^ 0x10));
}

void setAge(const fs::path& file, int minutes) {
  fs::last_write_time(file, fs::file_time_type::clock::now() - std::chrono::minutes(minutes));
}

}  // namespace

TEST_CASE("content: one digest, whole or in pieces") {
  for (size_t bytes : {size_t{0}, size_t{1}, size_t{kMiB} - 1, size_t{kMiB}, size_t{kMiB} + 1,
                       size_t{2 * kMiB}, size_t{9 * kMiB} + 7}) {
    const Bytes all = content(bytes);
    const Digest whole = contentDigest(all);
    if (bytes <= kMiB) CHECK(whole == sha256(all));
    for (size_t piece : {size_t{1000}, size_t{kMiB}, size_t{3} << 19}) {
      ContentHash hash;
      for (size_t at = 0; at < bytes; at += piece)
        hash.update(std::span(all).subspan(at, std::min(piece, bytes - at)));
      CHECK(hash.finish() == whole);
    }
  }
  Bytes a = content(3 * kMiB), b = a;
  std::swap_ranges(b.begin(), b.begin() + kMiB, b.begin() + kMiB);  // the same parts in another order
  CHECK(contentDigest(a) != contentDigest(b));
}

TEST_CASE("an image is stored once and mapped by whoever asks for it") {
  Folder folder;
  ImageCache cache = cacheAt(folder.path, 64 * kMiB);
  for (size_t bytes : {size_t{1}, size_t{4095}, size_t{4096}, size_t{4097}, size_t{3 * kMiB + 5}}) {
    const Bytes all = content(bytes);
    CHECK(cache.open(keyOf(all)) == nullptr);
    auto first = store(cache, all);
    CHECK(same(first, all));
    CHECK(same(cacheAt(folder.path, 64 * kMiB).open(keyOf(all)), all));
    first->settle();
    CHECK(same(first, all));
  }
  CHECK(folder.files().size() == 5);
  // Removed under a mapping, which stays whole.
  const Bytes all = content(3 * kMiB + 5);
  auto image = cache.open(keyOf(all));
  for (auto& file : folder.files()) fs::remove(file);
  image->settle();
  CHECK(same(image, all));
}

TEST_CASE("bytes that are not what they were called are not stored") {
  Folder folder;
  ImageCache cache = cacheAt(folder.path, 64 * kMiB);
  Bytes all = content(100000);
  auto writer = cache.write(keyOf(all));
  all[5] ^= std::byte{1};
  REQUIRE(writer->append(all));
  CHECK(writer->finish() == nullptr);
  auto unfinished = cache.write(keyOf(all));
  REQUIRE(unfinished->append(std::span(all).first(10)));
  CHECK(unfinished->finish() == nullptr);
  writer.reset();
  unfinished.reset();
  CHECK(folder.files().empty());
}

TEST_CASE("damaged files are found, removed, and stored again") {
  Folder folder;
  ImageCache cache = cacheAt(folder.path, 64 * kMiB);
  const Bytes all = content(2 * kMiB + 100);
  auto image = store(cache, all);
  SECTION("truncated") { fs::resize_file(folder.only(), all.size() - 1); }
  SECTION("emptied") { fs::resize_file(folder.only(), 0); }
  SECTION("truncated to whole pages") { fs::resize_file(folder.only(), kMiB); }
  SECTION("longer") { fs::resize_file(folder.only(), all.size() + 1); }
  SECTION("a bit of the first page") { flip(folder.only(), 0); }
  SECTION("a bit in the middle") { flip(folder.only(), kMiB + 12345); }
  SECTION("a bit of the last, partial page") { flip(folder.only(), all.size() - 1); }
  SECTION("another image's bytes") {
    std::ofstream(folder.only(), std::ios::binary)
        .write(reinterpret_cast<const char*>(content(all.size(), 2).data()),
               static_cast<std::streamsize>(all.size()));
  }
  CHECK(cache.open(keyOf(all)) == nullptr);
  CHECK(folder.files().empty());
  CHECK(same(store(cache, all), all));
  CHECK(same(cache.open(keyOf(all)), all));
}

TEST_CASE("a link in the folder is not followed") {
  Folder folder, elsewhere;
  ImageCache cache = cacheAt(folder.path, 64 * kMiB), other = cacheAt(elsewhere.path, 64 * kMiB);
  const Bytes all = content(10000);
  store(other, all);
  fs::create_symlink(elsewhere.only(), fs::path(folder.path) / elsewhere.only().filename());
  CHECK(cache.open(keyOf(all)) == nullptr);
}

TEST_CASE("the folder is used through its descriptor, wherever it has gone") {
  Folder folder;
  fs::create_directory(folder.path + "/before");
  ImageCache cache = cacheAt(folder.path + "/before", 64 * kMiB);
  fs::rename(folder.path + "/before", folder.path + "/after");
  fs::create_directory(folder.path + "/before");
  const Bytes all = content(10000);
  auto image = store(cache, all);
  cache.keepNote(keyOf(all), *image, {90, 1});
  CHECK(fs::is_empty(folder.path + "/before"));
  CHECK(same(cacheAt(folder.path + "/after", 64 * kMiB).open(keyOf(all)), all));
  store(cache, content(63 * kMiB + 1, 2));  // trims
  CHECK(cache.open(keyOf(all)) != nullptr);
  store(cache, content(2 * kMiB, 3));
  CHECK(fs::is_empty(folder.path + "/before"));
  CHECK(trimImages(openFolder(folder.path + "/after"), ~uint64_t{0}) <= 64 * kMiB);
}

TEST_CASE("another tenant's image cannot be had by its name") {
  Folder folder;
  fs::create_directory(folder.path + "/a");
  fs::create_directory(folder.path + "/b");
  ImageCache a = cacheAt(folder.path + "/a", 64 * kMiB), b = cacheAt(folder.path + "/b", 64 * kMiB);
  const Bytes all = content(10000);
  store(a, all);
  CHECK(b.open(keyOf(all)) == nullptr);
}

TEST_CASE("notes come back with the image, and damaged ones do not") {
  Folder folder;
  ImageCache cache = cacheAt(folder.path, 64 * kMiB);
  const Bytes all = content(10000);
  const ImageKey key = keyOf(all);
  auto image = store(cache, all);
  CHECK_FALSE(image->note);
  cache.keepNote(key, *image, {90, 1});
  image = cache.open(key);
  REQUIRE(same(image, all));
  REQUIRE(image->note);
  CHECK(image->note->architecture == 90);
  CHECK(image->note->mayPrint == 1);
  cache.keepNote(key, *image, {100, 0});
  CHECK(cache.open(key)->note->architecture == 100);
  flip(folder.only(), all.size() + 4);
  image = cache.open(key);
  REQUIRE(same(image, all));
  CHECK_FALSE(image->note);
  fs::resize_file(folder.only(), all.size() + 3);  // a note cut short
  CHECK(cache.open(key) == nullptr);
}

TEST_CASE("what was unused for longest goes first") {
  Folder folder;
  ImageCache cache = cacheAt(folder.path, 10 * kMiB);
  std::vector<Bytes> all;
  for (unsigned i = 0; i < 9; ++i) {
    all.push_back(content(kMiB, i));
    store(cache, all.back());
    setAge(folder.path + "/" + store(cache, all.back())->file, 100 - int(i));
  }
  CHECK(folder.files().size() == 9);
  CHECK(cache.open(keyOf(all[0])));  // used: now the youngest
  store(cache, content(3 * kMiB, 100));
  CHECK(cache.open(keyOf(all[0])));
  CHECK(cache.open(keyOf(all[1])) == nullptr);
  CHECK(cache.open(keyOf(all[2])) == nullptr);
  CHECK(cache.open(keyOf(all[3])));
  CHECK(trimImages(openFolder(folder.path), ~uint64_t{0}) == 10 * kMiB);
  // Larger than the bound: not stored at all, and nothing goes for it.
  auto vast = content(11 * kMiB, 101);
  CHECK(same(store(cache, vast), vast));
  CHECK(cache.open(keyOf(vast)) == nullptr);
  CHECK(cache.open(keyOf(all[8])));
}

TEST_CASE("all tenants' folders together, and what dead writers left") {
  Folder folder;
  for (const char* tenant : {"/a", "/b"}) {
    fs::create_directory(folder.path + tenant);
    ImageCache cache = cacheAt(folder.path + tenant, 8 * kMiB);
    store(cache, content(3 * kMiB, unsigned(tenant[1])));
  }
  std::ofstream(folder.path + "/a/0123456789abcdef.part") << "half";
  std::ofstream(folder.path + "/b/fedcba9876543210.part") << "half";
  setAge(folder.path + "/b/fedcba9876543210.part", 11);
  CHECK(trimImages(openFolder(folder.path), 16 * kMiB, 1) == 6 * kMiB + 4);
  CHECK(fs::exists(folder.path + "/a/0123456789abcdef.part"));  // somebody may be writing it
  CHECK_FALSE(fs::exists(folder.path + "/b/fedcba9876543210.part"));
  CHECK(trimImages(openFolder(folder.path), 4 * kMiB, 1) == 3 * kMiB + 4);
  CHECK(trimImages(openFolder(folder.path), 0, 1) == 4);
  CHECK(trimImages(openFolder(folder.path + "/nowhere"), 0, 1) == 0);
}

TEST_CASE("a folder that cannot be written is done without") {
  const Bytes all = content(2 * kMiB + 3);
  ImageCache missing = cacheAt("/nonexistent/gpupool", 64 * kMiB);
  CHECK(same(store(missing, all), all));
  CHECK(missing.open(keyOf(all)) == nullptr);
  CHECK(same(store(ImageCache(), all), all));
}

// A file size limit stands for the full disk: it needs no privileges. Memory files obey it as well, so the
// first refusal lifts it.
TEST_CASE("a disk that fills up while an image is written is done without") {
  Folder folder;
  const Bytes all = content(3 * kMiB + 3);
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, [](int) {
      const rlimit none{RLIM_INFINITY, RLIM_INFINITY};
      setrlimit(RLIMIT_FSIZE, &none);
    });
    const rlimit most{kMiB + 100, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &most);
    ImageCache cache = cacheAt(folder.path, 64 * kMiB);
    auto writer = cache.write(keyOf(all));
    bool good = writer != nullptr && folder.files().size() == 1;
    for (size_t at = 0; good && at < all.size(); at += 64 << 10)
      good = writer->append(std::span(all).subspan(at, std::min<size_t>(64 << 10, all.size() - at)));
    good = good && same(writer->finish(), all) && folder.files().empty() && cache.open(keyOf(all)) == nullptr;
    _exit(good ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

TEST_CASE("processes that write, read, damage and trim one folder at once get whole images or none") {
  Folder folder;
  constexpr int kProcesses = 6, kImages = 5;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = fork();
    if (child == 0) {
      std::mt19937 random(static_cast<unsigned>(p));
      const uint64_t most = p == 0 ? kMiB : 8 * kMiB;  // one trims nearly everything
      ImageCache cache = cacheAt(folder.path, most);
      int bad = 0, stored = 0;
      for (int turn = 0; turn < 60; ++turn) {
        const Bytes all = content(200000 + 50000 * (random() % kImages), 7);
        auto image = cache.open(keyOf(all));
        if (image != nullptr && !same(image, all)) ++bad;
        if (image == nullptr) {
          auto writer = cache.write(keyOf(all));
          for (size_t at = 0; at < all.size(); at += 64 << 10)
            if (!writer->append(std::span(all).subspan(at, std::min<size_t>(64 << 10, all.size() - at))))
              ++bad;
          image = writer->finish();
          if (!same(image, all)) ++bad;
          ++stored;
        }
        if (image != nullptr) cache.keepNote(keyOf(all), *image, {90, 1});
        if (p == 1 && turn % 10 == 0)
          for (auto& entry : fs::directory_iterator(folder.path)) {
            // As a crash may leave it; never under a mapping.
            const std::string half = folder.path + "/half.part";
            std::ofstream(half) << "half";
            if (entry.path().extension() != ".part") rename(half.c_str(), entry.path().c_str());
            unlink(half.c_str());
          }
      }
      _exit(bad != 0 || (p == 1 && stored == 0) ? 1 : 0);
    }
    REQUIRE(child > 0);
    children.push_back(child);
  }
  for (pid_t child : children) {
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  for (auto& file : folder.files()) CHECK(file.extension() != ".part");
}
