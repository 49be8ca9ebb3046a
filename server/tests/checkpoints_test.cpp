// Sessions that are written into files, and go on.
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <thread>

#include "server/front/checkpoint_cut.h"
#include "server/tests/session_bench.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;
namespace fs = std::filesystem;

namespace {

SideSettings writing(const std::string& folder, bool network = true, kj::Duration reads = 30 * kj::SECONDS) {
  SideSettings settings;
  settings.bounds.reads = reads;
  settings.checkpointFolder = folder;
  settings.network = network;
  return settings;
}

// A lease on both devices, and a folder.
struct Bench : private Folder, SessionBench {
  explicit Bench(bool folder = true, bool network = true, kj::Duration reads = 30 * kj::SECONDS)
      : SessionBench(writing(folder ? path : "", network, reads)) {
    REQUIRE(grant(kLease, 1, kGiB) == "");
  }
  ~Bench() {
    stop();
    CHECK(children().empty());
  }
  kj::Promise<Checkpointed> checkpoint(const std::string& name, uint32_t drainMs = 1000) {
    return checkpoints.checkpoint(kLease, drainMs, name).eagerlyEvaluate(nullptr);
  }
  std::string fails(const std::string& name) {
    auto order = checkpoint(name);
    return failure([&] { order.wait(io.waitScope); });
  }
  std::set<std::string> names(const std::string& folder = "") {
    std::set<std::string> found;
    for (const auto& entry : fs::directory_iterator(path + "/" + folder))
      found.insert(entry.path().filename());
    return found;
  }
  Manifest manifest(const std::string& name) {
    return decodeManifest(CheckpointFolder(path, kServer).read(name, kManifestName, kMostManifestBytes));
  }
  std::string check(const std::string& name, const Manifest::Session& session) {
    return checkFile(CheckpointFolder(path, kServer).open(name, session.file), session.facts);
  }
  using Folder::path;
};

}  // namespace

TEST_CASE("all sessions of a lease are written, and go on") {
  Bench bench;
  Opening one = bench.session(1, "train"), two = bench.session(2, "test", "ucx");
  const Checkpointed done = bench.checkpoint("monday").wait(bench.io.waitScope);
  CHECK(done.sessions == 2);
  CHECK(done.longestPauseMs == 13);
  CHECK(done.folder == bench.path + "/monday");
  CHECK(bench.order(one, 'e') == "e01");
  CHECK(bench.order(two, 'e') == "e01");
  CHECK_FALSE(bench.paused());
  CHECK(bench.epoch(1) == 1);
  CHECK(bench.sessions.living(kLease) == 2);
  CHECK(bench.names() == std::set<std::string>{"monday"});
  CHECK(bench.names("monday").size() == 3);

  const Manifest manifest = bench.manifest("monday");
  CHECK(manifest.lease == kLease);
  CHECK(manifest.server == kServer);
  CHECK(manifest.rowsHash == kRows);
  CHECK_FALSE(manifest.held);
  REQUIRE(manifest.devices.size() == 2);
  CHECK(manifest.devices[0].memoryBytes == kGiB);
  REQUIRE(manifest.sessions.size() == 2);
  uint64_t bytes = 0;
  for (const Manifest::Session& session : manifest.sessions) {
    CHECK(session.epoch == 1);
    CHECK(session.facts.lastFrame == 4711);
    CHECK(bench.check("monday", session) == "");
    bytes += session.facts.bytes;
  }
  CHECK(done.bytes == bytes);
  CHECK(manifest.sessions[0].command == "train");
  CHECK(manifest.sessions[1].transport == "ucx");

  CHECK(contains(bench.fails("monday"), "File exists"));
  CHECK(bench.checkpoint("tuesday").wait(bench.io.waitScope).sessions == 2);
  CHECK(bench.manifest("tuesday").id != manifest.id);
  CHECK(bench.names() == std::set<std::string>{"monday", "tuesday"});
  CHECK(bench.order(one, 'e') == "e01");
}

TEST_CASE("a session that cannot be written keeps the others from it, and all go on") {
  Bench bench;
  Opening one = bench.session(1), two = bench.session(2, "stubborn");
  bench.misbehave(two, '1');
  CHECK(contains(bench.fails("monday"), "stubborn (process"));
  bench.misbehave(two, '1');
  CHECK(contains(bench.fails("monday"), "a stream capture is open"));
  CHECK(bench.names().empty());
  CHECK_FALSE(bench.paused());
  CHECK(bench.order(one, 'e') == "e01");
  CHECK(bench.order(two, 'e') == "e01");
  CHECK(bench.checkpoint("monday").wait(bench.io.waitScope).sessions == 2);
}

TEST_CASE("no file is written before all sessions stand still") {
  Bench bench;
  Opening one = bench.session(1), two = bench.session(2);
  bench.misbehave(two, '2');  // it does not come to that
  auto order = bench.checkpoint("monday");
  bench.until([&] { return !bench.names().empty(); });
  const std::string draft = *bench.names().begin();
  bench.until([&] { return bench.names(draft).size() == 2; });
  bench.pause(200);
  for (const auto& file : bench.names(draft))
    CHECK(fs::file_size(bench.path + "/" + draft + "/" + file) == 0);
  CHECK(bench.paused());
  Opening late;
  CHECK(contains(bench.open(late, 3), "moving"));
  CHECK(late.suspended);
  bench.say(two, 'c');  // it ends
  CHECK(contains(failure([&] { order.wait(bench.io.waitScope); }), "it ended while it was to be written"));
  CHECK(bench.names().empty());
  CHECK(bench.order(one, 'e') == "e01");
  CHECK(bench.open(late, 3).empty());
}

TEST_CASE("a worker that dies while it is written leaves nothing") {
  for (const char how : {'3', '4'}) {
    CAPTURE(how);
    Bench bench;
    Opening one = bench.session(1), two = bench.session(2);
    bench.misbehave(one, how);
    CHECK(contains(bench.fails("monday"), "it ended while it was to be written"));
    CHECK(bench.names().empty());
    CHECK(bench.order(two, 'e') == "e01");
    CHECK(bench.sessions.living(kLease) == 1);
    CHECK(bench.checkpoint("monday").wait(bench.io.waitScope).sessions == 1);
  }
}

TEST_CASE("a worker that is stopped while its session is written or held is named, and ended") {
  const bool holds = GENERATE(false, true);
  Bench bench(true, true, 600 * kj::MILLISECONDS);
  Opening stuck = bench.session(1, "stuck", "ucx");
  REQUIRE(kill(bench.worker(stuck), SIGSTOP) == 0);
  auto held = [&] { return bench.checkpoints.hold(kLease, 1000, "monday").ignoreResult(); };
  auto order = holds ? held() : bench.checkpoint("monday").ignoreResult();
  const std::string why = failure([&] { order.wait(bench.io.waitScope); });
  CHECK(contains(why, "stuck (process "));
  CHECK(contains(why, "is stopped or hangs: it has read nothing for"));
  bench.until([&] { return bench.sessions.living(kLease) == 0; });
  CHECK(contains(bench.endText(), "the session's worker was stopped or hung"));
  CHECK(bench.names().empty());
  CHECK_FALSE(bench.paused());
}

TEST_CASE("what is no checkpoint's name, or has no place, is refused") {
  Bench bench;
  Opening one = bench.session(1);
  CHECK(contains(bench.fails("../monday"), "may begin with a '.'"));
  CHECK(contains(bench.fails("/etc/monday"), "is not in the server's checkpoint folder"));
  CHECK(contains(bench.fails(""), "is not in the server's checkpoint folder"));
  CHECK(contains(bench.fails("no/such"), "No such file"));
  fs::create_directory_symlink("/tmp", bench.path + "/link");
  CHECK_FALSE(bench.fails("link/monday").empty());
  fs::remove(bench.path + "/link");
  CHECK(bench.names().empty());
  fs::permissions(bench.path, fs::perms::none);
  if (access(bench.path.c_str(), W_OK) != 0) CHECK(contains(bench.fails("monday"), "Permission denied"));
  fs::permissions(bench.path, fs::perms::owner_all);
  CHECK(bench.order(one, 'e') == "e01");
  CHECK_FALSE(bench.paused());
}

TEST_CASE("a lease that is suspended, ends or has no session is not written") {
  Bench bench;
  CHECK(contains(bench.fails("monday"), "has no session"));
  CHECK_FALSE(bench.paused());
  Opening one = bench.session(1);
  bench.suspension.suspend(kLease, 1000).wait(bench.io.waitScope);
  CHECK(contains(bench.fails("monday"), "suspended: resume it first"));
  bench.suspension.resume(kLease).wait(bench.io.waitScope);
  CHECK(bench.checkpoint("monday").wait(bench.io.waitScope).sessions == 1);
  bench.misbehave(one, '2');
  auto order = bench.checkpoint("tuesday");
  bench.until([&] { return bench.names().size() == 2; });
  bench.revoke();
  CHECK_FALSE(failure([&] { order.wait(bench.io.waitScope); }).empty());
  CHECK(bench.names() == std::set<std::string>{"monday"});
  CHECK(contains(bench.fails("tuesday"), "not known here"));
}

TEST_CASE("a server without the option says so; one that comes again tidies up") {
  {
    Bench bench(false);
    Opening one = bench.session(1);
    CHECK(contains(bench.fails("monday"), "--checkpoint-folder"));
    CHECK(bench.order(one, 'e') == "e01");
  }
  Folder folder;
  const std::string left = folder.path + "/.new-" + kServer + "-" + Id::random().text();
  fs::create_directory(left);
  std::ofstream(left + "/session") << "half";
  SessionBench bench(writing(folder.path));
  bench.until([&] { return !fs::exists(left); });
}

TEST_CASE("what cannot be held, or is not, is refused with the reason") {
  Bench bench(true, false);
  const auto hold = [&] {
    auto order = bench.checkpoints.hold(kLease, 1000, "monday").eagerlyEvaluate(nullptr);
    return failure([&] { order.wait(bench.io.waitScope); });
  };
  const auto restore = [&] {
    auto order = bench.checkpoints.restore(kLease, "monday", false).eagerlyEvaluate(nullptr);
    return failure([&] { order.wait(bench.io.waitScope); });
  };
  CHECK(contains(hold(), "has no session"));
  Opening one = bench.session(1, "train");
  CHECK(contains(hold(), "train (process"));
  CHECK(contains(hold(), "shares memory with this server (transport shm)"));
  CHECK(contains(hold(), "this server takes no network sessions"));
  bench.leases.admissible(kLease)->protectMs = 30'000;
  CHECK(contains(hold(), "is not protected, for it began over shared memory (transport shm)"));
  bench.leases.admissible(kLease)->protectMs = 0;
  CHECK(restore() == "");  // it runs
  bench.suspension.suspend(kLease, 1000).wait(bench.io.waitScope);
  CHECK(contains(hold(), "suspended: resume it first"));
  CHECK(contains(restore(), "not held in files"));
  bench.suspension.resume(kLease).wait(bench.io.waitScope);
  CHECK(bench.names().empty());
  CHECK(bench.order(one, 'e') == "e01");
}

TEST_CASE("a server's next life knows the leases that were held, and only those whose files are whole") {
  Bench bench;
  const NotedHold whole{kLease, {7, 7}, "monday", kServer}, other{{9, 1}, {8, 8}, "monday", kServer},
      none{{2, 2}, {9, 9}, "tuesday", kServer}, copy{{3, 3}, {5, 5}, "copy", kServer};
  const auto publish = [&](const NotedHold& of, bool held) {
    Manifest manifest;
    manifest.id = of.checkpoint;
    manifest.lease = of.lease;
    manifest.held = held;
    auto draft = CheckpointFolder(bench.path, "another").begin(of.folder);  // not tidied up meanwhile
    draft.publish(kManifestName, encodeManifest(manifest));
  };
  publish(whole, true);
  publish(copy, false);
  HeldNotes notes({whole, other, none, copy});
  size_t stored = 0;
  notes.onChange([&] { ++stored; });
  notes.write({4, 4}, {{6, 6}, "now", kServer});  // of this life
  const auto folder = std::make_shared<const CheckpointFolder>(bench.path, kServer);
  notes.look(bench.timer, folder).wait(bench.io.waitScope);
  CHECK(notes.found() == std::vector{kLease});
  REQUIRE(notes.found(kLease) != nullptr);
  CHECK(notes.found(kLease)->checkpoint == Id{7, 7});
  CHECK(notes.found(kLease)->folder == "monday");
  CHECK(notes.found({4, 4}) == nullptr);
  CHECK(notes.all().size() == 2);
  CHECK(stored == 2);
  notes.erase(kLease);
  notes.erase({4, 4});
  CHECK(notes.all().empty());
  CHECK(stored == 4);

  HeldNotes lost({whole});
  lost.look(bench.timer, nullptr).wait(bench.io.waitScope);
  CHECK(lost.all().empty());
}

TEST_CASE("what is not written leaves no note") {
  Bench bench;
  Opening one = bench.session(1, "train", "ucx");
  const std::string name = "no/such/place";
  auto order = bench.checkpoints.hold(kLease, 1000, name).eagerlyEvaluate(nullptr);
  CHECK(failure([&] { order.wait(bench.io.waitScope); }) != "");
  CHECK(bench.checkpoints.notes().all().empty());
  CHECK(bench.order(one, 'e') == "e01");
}

TEST_CASE("a lease that is held has nothing here, and its clients are told to ask again") {
  Bench bench;
  Opening one = bench.session(1, "train", "ucx");
  bench.leases.pauseToHold(kLease);
  Opening early;
  CHECK(bench.open(early, 1, 2) == "a session of the lease is moving");
  CHECK(early.suspended);
  bench.leases.setHeld(kLease, {{7, 7}, "monday", "node"}, {});
  CHECK(bench.leases.reserved(0) == 0);
  CHECK(bench.leases.suspended().size() == 1);
  Opening client;
  CHECK(bench.open(client, 1, 2) == "the lease is suspended");
  CHECK(client.suspended);
  CHECK(
      contains(failure([&] { bench.suspension.resume(kLease).wait(bench.io.waitScope); }), "held in files"));
  CHECK(bench.leases.reserved(0) == 0);
  CHECK(
      contains(failure([&] { bench.checkpoints.restore(kLease, "monday", false).wait(bench.io.waitScope); }),
               "No such file"));
  CHECK(bench.paused());
  // Whole, and of this lease, and not the one in which it is held.
  {
    Manifest manifest;
    manifest.id = {8, 8};
    manifest.lease = kLease;
    manifest.tenant = "tenant";
    manifest.held = true;
    auto draft = CheckpointFolder(bench.path, kServer).begin("monday");
    draft.publish(kManifestName, encodeManifest(manifest));
  }
  const std::string why =
      failure([&] { bench.checkpoints.restore(kLease, "monday", false).wait(bench.io.waitScope); });
  CHECK(contains(why, "it is not the one in which the lease is held"));
  CHECK(bench.leases.admissible(kLease)->held.has_value());
}

TEST_CASE("a lease that runs does not go back into what is not its sessions', and runs on") {
  Bench bench;
  const auto refused = [&](const std::string& name) {
    auto order = bench.checkpoints.restore(kLease, name, true).eagerlyEvaluate(nullptr);
    const std::string why = failure([&] { order.wait(bench.io.waitScope); });
    CHECK_FALSE(bench.paused());
    CHECK_FALSE(bench.leases.admissible(kLease)->held.has_value());
    return why;
  };
  const auto publish = [&](const std::string& name, const Manifest& manifest) {
    auto draft = CheckpointFolder(bench.path, kServer).begin(name);
    draft.publish(kManifestName, encodeManifest(manifest));
  };
  Opening one = bench.session(1, "train", "ucx");
  CHECK(contains(refused("monday"), "No such file"));
  bench.checkpoint("monday").wait(bench.io.waitScope);
  Manifest other = bench.manifest("monday");
  other.lease = {9, 9};
  publish("other", other);
  CHECK(contains(refused("other"), "it is of another lease"));
  other = bench.manifest("monday");
  other.held = true;
  publish("left", other);
  CHECK(contains(refused("left"), "the lease was held in it, and has gone on"));
  Opening two = bench.session(2, "test", "ucx");
  CHECK(contains(refused("monday"), "a session of the lease has begun or ended since"));
  bench.checkpoint("both").wait(bench.io.waitScope);
  bench.say(two, 'q');
  bench.until([&] { return bench.sessions.living(kLease) == 1; });
  CHECK(contains(refused("both"), "a session of the lease has begun or ended since"));
  Opening three = bench.session(3, "third", "shm");
  bench.checkpoint("shared").wait(bench.io.waitScope);
  CHECK(bench.manifest("shared").sessions.back().transport == "ucx");  // where it goes on it shares nothing
  CHECK(bench.names() == std::set<std::string>{"both", "left", "monday", "other", "shared"});
  CHECK(bench.order(one, 'e') == "e01");
}

namespace {

// A lease that is held in files, of which a test writes others, and the answers of a restore from those.
struct ForeignBench : Bench {
  ForeignBench() {
    Opening one = session(1, "train", "ucx");
    checkpoint("whole").wait(io.waitScope);
    right = manifest("whole");
    right.id = kCheckpoint;
    right.held = true;
    right.sessions[0].facts.rowsHash = kRows;  // not the fake worker's
    sessions.end(kLease, "its files are enough").wait(io.waitScope);
    leases.pauseToHold(kLease);
    leases.setHeld(kLease, {kCheckpoint, "monday", kServer}, {});
  }
  // Writes that manifest and the session's file, and restores from them. The reason; all is as before.
  std::string refused(const Manifest& manifest, const std::function<void(std::string&)>& file = {}) {
    return refusedBytes(encodeManifest(manifest), file);
  }
  std::string refusedBytes(const std::vector<std::byte>& manifest,
                           const std::function<void(std::string&)>& file = {}) {
    fs::remove_all(path + "/monday");
    fs::create_directory(path + "/monday");
    write("manifest", {reinterpret_cast<const char*>(manifest.data()), manifest.size()});
    std::string session = read(path + "/whole/" + right.sessions[0].file);
    if (file) file(session);
    write(right.sessions[0].file, session);
    const std::string why = restore();
    CHECK(leases.admissible(kLease)->held.has_value());
    CHECK(leases.reserved(0) == 0);
    CHECK(sessions.living(kLease) == 0);
    return why;
  }
  std::string restore() {
    auto order = checkpoints.restore(kLease, "monday", false).eagerlyEvaluate(nullptr);
    return failure([&] { order.wait(io.waitScope); });
  }
  static std::string read(const std::string& name) {
    std::string bytes(fs::file_size(name), '\0');
    std::ifstream(name, std::ios::binary).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return bytes;
  }
  void write(const std::string& name, const std::string& bytes) {
    std::ofstream(path + "/monday/" + name, std::ios::binary) << bytes;
  }

  static constexpr Id kCheckpoint{7, 7};
  Manifest right;
};

}  // namespace

TEST_CASE("files of another driver, GPU, build or lease are refused, each with its reason") {
  ForeignBench bench;
  using Change = std::function<void(Manifest&)>;
  const std::vector<std::pair<const char*, Change>> cases{
      {"it was written with another driver", [](Manifest& of) { ++of.driverVersion; }},
      {"it is of a NVIDIA B300", [](Manifest& of) { of.devices[0].name = "NVIDIA B300"; }},
      {"and the device here is a", [](Manifest& of) { of.devices[1].totalBytes *= 2; }},
      {"and the device here is a", [](Manifest& of) { of.devices[0].software ^= true; }},
      {"another number of devices", [](Manifest& of) { of.devices.pop_back(); }},
      {"written by another build of gpupool", [](Manifest& of) { of.sessions[0].facts.rowsHash = 0xdead; }},
      {"it is of another lease", [](Manifest& of) { of.lease = {9, 9}; }},
      {"it is of another lease", [](Manifest& of) { of.tenant = "eve"; }},
      {"not the one in which the lease is held", [](Manifest& of) { of.id = {8, 8}; }},
      {"not the one in which the lease is held", [](Manifest& of) { of.held = false; }},
      {"No such file", [](Manifest& of) { of.sessions[0].file = "another"; }},
      {"monday/../whole", [](Manifest& of) { of.sessions[0].file = "../whole/" + of.sessions[0].file; }},
      {"another one than its manifest tells of", [](Manifest& of) { ++of.sessions[0].facts.lastFrame; }},
      {"another one than its manifest tells of",
       [](Manifest& of) { of.sessions[0].facts.digest[5] ^= std::byte{1}; }}};
  for (const auto& [reason, change] : cases) {
    CAPTURE(reason);
    Manifest foreign = bench.right;
    change(foreign);
    const std::string why = bench.refused(foreign);
    CAPTURE(why);
    CHECK(contains(why, reason));
  }
}

TEST_CASE("files that are damaged at any place are refused, and the whole ones are not") {
  ForeignBench bench;
  const auto manifest = encodeManifest(bench.right);
  for (size_t at = 0; at < manifest.size(); at += 211) {
    CAPTURE(at);
    auto flipped = manifest;
    flipped[at] ^= std::byte{4};
    CHECK(contains(bench.refusedBytes(flipped), "its manifest is damaged"));
    CHECK(contains(bench.refusedBytes({manifest.begin(), manifest.begin() + static_cast<ptrdiff_t>(at)}),
                   "its manifest is damaged"));
  }
  const size_t size = bench.right.sessions[0].facts.bytes;
  for (const size_t at : {size_t{0}, size_t{9}, size / 4, size / 2, size - 1}) {
    CAPTURE(at);
    CHECK_FALSE(bench.refused(bench.right, [at](std::string& file) { file[at] ^= 4; }).empty());
    CHECK_FALSE(bench.refused(bench.right, [at](std::string& file) { file.resize(at); }).empty());
  }
  CHECK_FALSE(bench.refused(bench.right, [](std::string& file) { file += 'x'; }).empty());
  bench.write(bench.right.sessions[0].file,
              bench.read(bench.path + "/whole/" + bench.right.sessions[0].file));
  bench.write("manifest", {reinterpret_cast<const char*>(manifest.data()), manifest.size()});
  // They get as far as a worker, and the fake one cannot rebuild anything.
  auto order = bench.checkpoints.restore(kLease, "monday", false).eagerlyEvaluate(nullptr);
  bench.until([&] { return bench.leases.reserved(0) != 0; });
  bench.revoke();
  CHECK_FALSE(failure([&] { order.wait(bench.io.waitScope); }).empty());
}

TEST_CASE(
    "a lease that has left its devices waits for what others have of its memory for a time, no longer") {
  Bench bench;
  bench.sessions.onSharing([](const Id&, const Id&) { return true; });
  const Id other{1, 2};
  REQUIRE(bench.grant(other, 2, kGiB) == "");
  const auto said = [&](Opening& opening, const std::string& order) {
    opening.stream->write(order.data(), order.size()).wait(bench.io.waitScope);
    return bench.hear(opening);
  };
  Opening owner = bench.session(1), guest;
  guest.lease = other;
  guest.rowsHash = kRows;
  REQUIRE(bench.open(guest, 2) == "");
  REQUIRE(said(owner, "m") == "taken, others have 0 MiB");
  REQUIRE(said(guest, "I" + said(owner, "O")) == "opened at 0");
  const bool closes = GENERATE(true, false);
  bool done = false;
  auto taken = bench.sessions.takenBack(kLease, (closes ? 20'000 : 300) * kj::MILLISECONDS, "it has left")
                   .then([&] { done = true; })
                   .eagerlyEvaluate(nullptr);
  kill(bench.worker(owner), SIGKILL);
  bench.until([&] { return bench.sessions.living(kLease) == 0; });
  CHECK_FALSE(done);
  if (closes) CHECK(said(guest, "X") == "told");
  bench.until([&] { return done; });
  CHECK(bench.sessions.living(other) == (closes ? 1 : 0));
  if (!closes) CHECK(bench.endText() == "it has left");
}

TEST_CASE("while files get their place a session that ends decides nothing for the others") {
  for (const std::string& outcome : {std::string(), std::string("no room")}) {
    CheckpointCut cut(2);
    std::promise<void> begun, goOn;
    const auto publish = [&] {
      begun.set_value();
      goOn.get_future().wait();
      return outcome;
    };
    const auto finish = [&] {
      return std::async(std::launch::async, [&] { return cut.finish(publish, true); });
    };
    auto first = finish(), second = finish();
    begun.get_future().wait();
    cut.fail("a session has ended");
    const auto soon = std::chrono::milliseconds(20);
    CHECK(first.wait_for(soon) == std::future_status::timeout);
    CHECK(second.wait_for(soon) == std::future_status::timeout);
    goOn.set_value();
    CHECK(first.get().empty() == outcome.empty());
    CHECK(second.get().empty() == outcome.empty());
    CHECK(cut.published() == outcome.empty());
  }
}
