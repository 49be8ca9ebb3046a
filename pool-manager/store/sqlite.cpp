#include <fcntl.h>
#include <sqlite3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <variant>

#include "pool-manager/store/medium.h"

namespace gpupool::pool {
namespace {

using Value = std::variant<uint64_t, std::string_view>;

// A prepared statement, reset when the last user of a run is done with it.
class Statement {
 public:
  Statement(sqlite3* database, const char* text) : database_(database) {
    if (sqlite3_prepare_v2(database, text, -1, &statement_, nullptr) != SQLITE_OK)
      throw std::runtime_error(std::string("store: ") + sqlite3_errmsg(database));
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  void bind(std::initializer_list<Value> values) {
    sqlite3_reset(statement_);
    int at = 0;
    for (const Value& value : values) {
      ++at;
      if (const auto* number = std::get_if<uint64_t>(&value))
        sqlite3_bind_int64(statement_, at, static_cast<sqlite3_int64>(*number));
      else
        sqlite3_bind_blob64(statement_, at, std::get<std::string_view>(value).data(),
                            std::get<std::string_view>(value).size(), SQLITE_TRANSIENT);
    }
  }

  // True: a row is there. False: done.
  bool step() {
    const int code = sqlite3_step(statement_);
    if (code == SQLITE_ROW) return true;
    const std::string why = code == SQLITE_DONE ? "" : sqlite3_errmsg(database_);
    sqlite3_reset(statement_);
    if (!why.empty()) throw std::runtime_error("store: " + why);
    return false;
  }
  void run(std::initializer_list<Value> values) {
    bind(values);
    while (step()) {
    }
  }

  uint64_t number(int column) const {
    return static_cast<uint64_t>(sqlite3_column_int64(statement_, column));
  }
  std::string blob(int column) const {
    const auto* at = static_cast<const char*>(sqlite3_column_blob(statement_, column));
    const int size = sqlite3_column_bytes(statement_, column);
    return at == nullptr ? std::string() : std::string(at, static_cast<size_t>(size));
  }

 private:
  sqlite3* database_;
  sqlite3_stmt* statement_ = nullptr;
};

struct Close {
  void operator()(sqlite3* database) const { sqlite3_close(database); }
};

class SqliteMedium final : public Medium {
 public:
  explicit SqliteMedium(const std::string& path) : database_(open(path)), db_(database_.get()) {}

  std::vector<Entry> range(const std::string& prefix) override {
    std::vector<Entry> found;
    range_.bind({prefix});
    while (range_.step()) {
      Entry entry{range_.blob(0), range_.blob(1), range_.number(2)};
      if (!entry.key.starts_with(prefix)) break;
      found.push_back(std::move(entry));
    }
    range_.bind({prefix});  // resets
    return found;
  }

  // One SQLite transaction, and so one fsync, for all of them.
  std::vector<Outcome> apply(std::span<const Transaction> group) override {
    begin_.run({});
    try {
      revision_.bind({});
      uint64_t revision = revision_.step() ? revision_.number(0) : 0;
      revision_.bind({});
      std::vector<Outcome> outcomes;
      for (const Transaction& transaction : group) {
        if (!holds(transaction)) {
          outcomes.push_back({Outcome::Kind::compareFailed, 0, {}});
          continue;
        }
        ++revision;
        for (const Write& write : transaction.writes) {
          if (write.value)
            put_.run({write.key, *write.value, revision});
          else
            erase_.run({write.key});
        }
        outcomes.push_back({Outcome::Kind::committed, revision, {}});
      }
      setRevision_.run({revision});
      commit_.run({});
      return outcomes;
    } catch (const std::runtime_error&) {
      sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
      throw;
    }
  }

 private:
  bool holds(const Transaction& transaction) {
    for (const Compare& compare : transaction.compares) {
      revisionOf_.bind({compare.key});
      const uint64_t revision = revisionOf_.step() ? revisionOf_.number(0) : 0;
      revisionOf_.bind({compare.key});  // resets
      if (revision != compare.revision) return false;
    }
    return true;
  }

  static std::unique_ptr<sqlite3, Close> open(const std::string& path) {
    // Created here, because SQLite would give it the umask's mode, and session keys lie in it.
    const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) throw std::runtime_error("store: " + path + ": " + std::strerror(errno));
    ::close(file);
    sqlite3* raw = nullptr;
    const int code =
        sqlite3_open_v2(path.c_str(), &raw, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, nullptr);
    std::unique_ptr<sqlite3, Close> database(raw);
    if (code != SQLITE_OK) throw std::runtime_error("store: " + path + ": " + sqlite3_errstr(code));
    sqlite3_busy_timeout(raw, 200);
    execute(raw, path,
            "PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;"
            "CREATE TABLE IF NOT EXISTS kv(k BLOB PRIMARY KEY, v BLOB NOT NULL, revision INTEGER NOT NULL) "
            "WITHOUT ROWID;"
            "CREATE TABLE IF NOT EXISTS counter(id INTEGER PRIMARY KEY, revision INTEGER NOT NULL);"
            "BEGIN IMMEDIATE; COMMIT;");
    return database;
  }

  static void execute(sqlite3* database, const std::string& path, const char* text) {
    char* error = nullptr;
    const int code = sqlite3_exec(database, text, nullptr, nullptr, &error);
    const std::string why = error != nullptr ? error : sqlite3_errstr(code);
    sqlite3_free(error);
    if (code == SQLITE_BUSY)
      throw std::runtime_error("store: " + path + " is in use by another gpupool-manager");
    if (code != SQLITE_OK) throw std::runtime_error("store: " + path + ": " + why);
  }

  std::unique_ptr<sqlite3, Close> database_;
  sqlite3* db_;
  Statement range_{db_, "SELECT k, v, revision FROM kv WHERE k >= ? ORDER BY k"};
  Statement revisionOf_{db_, "SELECT revision FROM kv WHERE k = ?"};
  Statement put_{db_, "INSERT OR REPLACE INTO kv VALUES (?, ?, ?)"};
  Statement erase_{db_, "DELETE FROM kv WHERE k = ?"};
  Statement revision_{db_, "SELECT revision FROM counter WHERE id = 1"};
  Statement setRevision_{db_, "INSERT OR REPLACE INTO counter VALUES (1, ?)"};
  Statement begin_{db_, "BEGIN IMMEDIATE"};
  Statement commit_{db_, "COMMIT"};
};

}  // namespace

std::unique_ptr<Store> openSqliteStore(const std::string& path) {
  return makeStore(std::make_unique<SqliteMedium>(path), WritesOn::ownThread);
}

}  // namespace gpupool::pool
