// The folder of checkpoints: what names may name, and that a checkpoint is whole or not there.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>

#include "server/files/checkpoint_folder.h"

#include "catch.h"

using namespace gpupool::server;
namespace fs = std::filesystem;

namespace {

struct Place {
  Place() {
    char name[] = "/tmp/checkpointsXXXXXX";
    if (mkdtemp(name) == nullptr) abort();
    path = name;
    fs::create_directory(path + "/root");
  }
  ~Place() { fs::remove_all(path); }
  std::string root() const { return path + "/root"; }
  std::set<std::string> names(const std::string& folder = "") const {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(root() + "/" + folder))
      found.insert(entry.path().filename());
    return found;
  }
  std::string path;
};

std::span<const std::byte> bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

template <class Action>
std::string failure(Action&& action) {
  try {
    action();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("checkpoint folder: what a name means, and what it may not") {
  const CheckpointFolder folder("/srv/checkpoints", "node");
  CHECK(folder.within("monday") == "monday");
  CHECK(folder.within("/srv/checkpoints/a/b/") == "a/b");
  CHECK(folder.within("a//b") == "a/b");
  CHECK(folder.pathOf("monday") == "/srv/checkpoints/monday");
  for (const char* name : {"", "/", "/srv/checkpoints", "/srv/checkpoints/", "/srv/checkpointsx/a",
                           "/etc/passwd", "..", "a/../..", "a/../../etc", ".hidden", "a/.", "//"}) {
    CAPTURE(name);
    CHECK_FALSE(failure([&] { folder.within(name); }).empty());
  }
  CHECK_FALSE(failure([&] { folder.within(std::string(2000, 'a')); }).empty());
  CHECK_FALSE(failure([&] { folder.within(std::string("a\0b", 3)); }).empty());
  CHECK_FALSE(failure([&] { folder.within("a\nb"); }).empty());
}

TEST_CASE("checkpoint folder: a checkpoint gets its place when it is whole") {
  const Place place;
  const CheckpointFolder folder(place.root(), "node");
  {
    auto draft = folder.begin("monday");
    const Descriptor file = draft.create("one");
    REQUIRE(write(file, "content", 7) == 7);
    CHECK_FALSE(place.names().contains("monday"));
    draft.publish("manifest", bytes("what it is"));
  }
  CHECK(place.names() == std::set<std::string>{"monday"});
  CHECK(place.names("monday") == std::set<std::string>{"manifest", "one"});
  struct stat status{};
  REQUIRE(stat((place.root() + "/monday").c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0700);
  REQUIRE(stat((place.root() + "/monday/one").c_str(), &status) == 0);
  CHECK((status.st_mode & 0777) == 0600);
  const auto read = folder.read("monday", "manifest", 100);
  CHECK(std::string(reinterpret_cast<const char*>(read.data()), read.size()) == "what it is");
  CHECK(has(failure([&] { folder.read("monday", "manifest", 9); }), "too long"));
  CHECK(has(failure([&] { folder.read("tuesday", "manifest", 9); }), "No such file"));
  CHECK(has(failure([&] { folder.begin("monday"); }), "File exists"));
  CHECK(has(failure([&] { folder.begin("no/such"); }), "No such file"));
  CHECK(has(failure([&] { folder.begin("monday/within"); }), "within another checkpoint"));
  CHECK(place.names() == std::set<std::string>{"monday"});
}

TEST_CASE("checkpoint folder: a checkpoint takes another one's place at one moment, and that one goes") {
  const Place place;
  const CheckpointFolder folder(place.root(), "node");
  const std::set<std::string> before{"manifest", "one"};
  CHECK(has(failure([&] { folder.begin("monday", before); }), "No such file"));
  {
    auto draft = folder.begin("monday");
    draft.create("one");
    draft.publish("manifest", bytes("first"));
  }
  {
    auto draft = folder.begin("monday", before);
    draft.create("two");
  }
  CHECK(place.names("monday") == before);  // it was not published
  {
    auto draft = folder.begin("monday", before);
    draft.create("two");
    CHECK(place.names("monday") == before);
    draft.publish("manifest", bytes("second"));
    CHECK(place.names("monday") == std::set<std::string>{"manifest", "two"});
  }
  const auto read = folder.read("monday", "manifest", 100);
  CHECK(std::string(reinterpret_cast<const char*>(read.data()), read.size()) == "second");
  CHECK(place.names() == std::set<std::string>{"monday"});
  std::ofstream(place.root() + "/file") << "x";
  CHECK(has(failure([&] { folder.begin("file", before); }), "Not a directory"));
}

TEST_CASE("checkpoint folder: what is not of a checkpoint is not replaced with it") {
  const Place place;
  const CheckpointFolder folder(place.root(), "node");
  const std::set<std::string> before{"manifest", "one"};
  const auto notes = [&] { return place.root() + "/monday/notes.txt"; };
  {
    auto draft = folder.begin("monday");
    draft.create("one");
    draft.publish("manifest", bytes("first"));
  }
  const bool folderOfSomebody = GENERATE(false, true);
  const auto put = [&] {
    if (folderOfSomebody)
      fs::create_directory(notes());
    else
      std::ofstream(notes()) << "x";
  };
  put();
  CHECK(has(failure([&] { folder.begin("monday", before); }), "notes.txt"));
  CHECK(place.names("monday").size() == 3);
  fs::remove(notes());
  {
    auto draft = folder.begin("monday", before);
    put();  // while the next one is written
    CHECK(has(failure([&] { draft.publish("manifest", bytes("second")); }), "notes.txt"));
  }
  CHECK(place.names() == std::set<std::string>{"monday"});
  CHECK(fs::exists(notes()));
  const auto read = folder.read("monday", "manifest", 100);
  CHECK(std::string(reinterpret_cast<const char*>(read.data()), read.size()) == "first");
}

TEST_CASE("checkpoint folder: what is not published leaves nothing") {
  const Place place;
  const CheckpointFolder folder(place.root(), "node");
  {
    auto draft = folder.begin("monday");
    draft.create("one");
    draft.create("two");
    CHECK(has(failure([&] { draft.create("two"); }), "File exists"));
    CHECK(place.names().size() == 1);
  }
  CHECK(place.names().empty());
  {
    auto draft = folder.begin("monday");
    fs::create_directory(place.root() + "/monday");  // somebody was faster
    CHECK(has(failure([&] { draft.publish("manifest", bytes("x")); }), "File exists"));
  }
  CHECK(place.names() == std::set<std::string>{"monday"});
  CHECK(place.names("monday").empty());
}

TEST_CASE("checkpoint folder: what a server that was killed has left goes, and no other server's") {
  const Place place;
  const CheckpointFolder node(place.root(), "node"), other(place.root(), "node-2");
  auto mine = std::make_unique<CheckpointFolder::Draft>(node.begin("monday"));
  auto theirs = std::make_unique<CheckpointFolder::Draft>(other.begin("monday"));
  mine->create("one");
  CHECK(place.names().size() == 2);
  node.removeLeftovers();
  CHECK(place.names().size() == 1);
  CHECK(place.names().begin()->starts_with(".new-node-2-"));
  theirs->publish("manifest", bytes("x"));
  node.removeLeftovers();
  CHECK(place.names() == std::set<std::string>{"monday"});
}

TEST_CASE("checkpoint folder: no link leads out of it") {
  const Place place;
  const CheckpointFolder folder(place.root(), "node");
  fs::create_directory(place.path + "/outside");
  std::ofstream(place.path + "/outside/manifest") << "secret";
  fs::create_directory_symlink(place.path + "/outside", place.root() + "/link");
  CHECK_FALSE(failure([&] { folder.begin("link/monday"); }).empty());
  CHECK_FALSE(failure([&] { folder.read("link", "manifest", 100); }).empty());
  CHECK(has(failure([&] { folder.begin("link"); }), "File exists"));
  fs::create_directory(place.root() + "/here");
  fs::create_symlink(place.path + "/outside/manifest", place.root() + "/here/manifest");
  CHECK_FALSE(failure([&] { folder.read("here", "manifest", 100); }).empty());
  CHECK_FALSE(failure([&] { folder.read("here", "../here/manifest", 100); }).empty());
  REQUIRE(mkfifo((place.root() + "/here/pipe").c_str(), 0600) == 0);
  CHECK(has(failure([&] { folder.read("here", "pipe", 100); }), "no plain file"));
  CHECK(fs::directory_iterator(place.path + "/outside") != fs::directory_iterator());
}
