#pragma once

#include <cstddef>
#include <string_view>

#include <boost/json.hpp>

#include "bulkhead/control.h"
#include "clients/cli/commands/command.h"

namespace bulkhead::cli {

/// "note: …" on standard error, with --json one {"note": …}: never among what a command prints.
void tell_note(const Session& session, std::string_view text);

/// Whoever waits for a call is told when a new supervisor took it over. `then` runs afterwards: to subscribe again.
void tell_of_new_supervisors(const Session& session, ControlClient& control, std::function<void()> then = {});

/// Why a subscription ended, as the next supervisor's pid tells it: there is another one, or the same has closed the
/// connection, as it does for a slow reader.
class Interruption {
public:
    explicit Interruption(ControlClient& control) : control_{control} {}
    /// Before each subscription: a call after it could reconnect, and lose it unseen.
    void ask();
    /// `what` may be missing: "events".
    void tell(const Session& session, std::string_view what) const;

private:
    ControlClient& control_;
    std::int64_t before_ = 0, now_ = 0;  ///< pids
};

/// Where in a new tail of a log that begins which was not shown yet, `last` being the last line that was: behind it,
/// or at the start where it is not there, for then all lines are newer.
[[nodiscard]] std::size_t first_new_line(const boost::json::array& lines, const boost::json::value& last);

}  // namespace bulkhead::cli
