#pragma once

#include <map>
#include <string>

#include <boost/json.hpp>

#include "clients/cli/text/terminal.h"

namespace bulkhead::cli {

/// Shows loads' progress on standard error: on a terminal a bar per worker, else a line per phase.
/// The cursor stays below what was drawn.
class Progress {
public:
    explicit Progress(bool with_bars) : with_bars_{with_bars} {}
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    void on_event(const boost::json::object& event);

    /// "minilm/0  reading   [########--------]  50%  43.5 MiB of 87.0 MiB"
    [[nodiscard]] static std::string bar(const boost::json::value& event, std::size_t width);

private:
    void redraw();

    bool with_bars_;
    std::map<std::string, std::string> lines_;  ///< by worker
    std::size_t drawn_ = 0;                     ///< lines of the last picture
};

}  // namespace bulkhead::cli
