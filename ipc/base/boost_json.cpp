// Boost.JSON from its headers, compiled once: Debian's library package is then not needed at run time.
#include <boost/json/src.hpp>
