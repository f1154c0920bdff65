"""`penstock dashboard`: the address of the page that shows what runs."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from penstock.cli.connection import FOLDER, Folder, find_access
from penstock.cli.output import Form, Output, out, show
from penstock.client import Client


def dashboard(
    job: Annotated[str, typer.Argument(help="The job whose page it is; none: all jobs.")] = "",
    folder: Folder = FOLDER,
    output: Output = Form.TABLE,
) -> None:
    """Print the dashboard's address, with a token that may read and nothing else; whoever has it can look."""
    url, token, ca = find_access(folder, role="reader")
    with Client(url, token, ca=ca) as client:
        # Said here, not in a browser: what is wrong with address, token or name.
        if job:
            client.job(job)
        else:
            client.jobs_page(limit=1)
    # Behind the #: a browser keeps that part to itself.
    page = f"&job={quote(job, safe='')}" if job else ""
    address = f"{url.rstrip('/')}/#token={quote(token, safe='')}{page}"
    if output is Form.TABLE:
        out.print(address, markup=False, highlight=False, soft_wrap=True)  # whole, to be copied
    else:
        show({"url": address}, output, lambda: address)
