#pragma once

#include <cstddef>
#include <string_view>

#include <boost/json.hpp>

#include "bulkhead/control.h"
#include "clients/cli/commands/command.h"

namespace bulkhead::cli {

/// Prints "note: …" to standard error, with --json {"note": …}, so that it is not part of a
/// command's output.
void tell_note(const Session& session, std::string_view text);

/// Tells the user of a waiting call that a new supervisor took it over. `then` runs afterwards, to
/// subscribe again.
void report_new_supervisors(const Session& session, ControlClient& control, std::function<void()> then = {});

/// Tells why a subscription ended, from the supervisor's pid: there is another supervisor, or the
/// same one closed the connection, as it does for a slow reader.
class Interruption {
public:
    explicit Interruption(ControlClient& control) : control_{control} {}
    /// Call it before each subscription: a later call could reconnect and lose the
    /// subscription unnoticed.
    void ask();
    /// Names what may be missing: `what`, such as "events".
    void tell(const Session& session, std::string_view what) const;

private:
    ControlClient& control_;
    std::int64_t before_ = 0, now_ = 0;  ///< pids
};

/// Returns the index in a new log tail of the first line not shown yet. `last` is the last line
/// shown; if it is not in the tail, all lines are newer.
[[nodiscard]] std::size_t first_new_line(const boost::json::array& lines, const boost::json::value& last);

}  // namespace bulkhead::cli
