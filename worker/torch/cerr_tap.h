#pragma once

#include <string>

namespace bulkhead::worker {

/// Copies what is written to std::cerr, and passes it on. A compiled AOTInductor model that throws
/// prints its message there, and returns only a number.
///
/// Thread  `clear` and `text` on any; writers to std::cerr are serialised
class CerrTap {
public:
    /// The process' only tap. The first call installs it; it is never removed.
    static CerrTap& instance();

    void clear();
    /// The last 16 KiB written since `clear`.
    [[nodiscard]] std::string text() const;

private:
    CerrTap();
    class Tee;
    Tee* tee_;  ///< lives as long as std::cerr, which may be used while the process ends
};

}  // namespace bulkhead::worker
