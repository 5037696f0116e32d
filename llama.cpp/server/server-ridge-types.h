#pragma once

// What upstream's structs hold of ours: one include for their headers.

#include "server-ridge-cells.h"
#include "server-ridge-request.h"
#include "server-ridge-stats.h"
